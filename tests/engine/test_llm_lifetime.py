"""LLM among threads, and its end: nothing hangs, nothing stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.errors import EngineClosedError
from rawpaged.outputs import CompletionOutput, RequestOutput
from tests.tiny import LLAMA, engine_of, tiny_config, wait_until

LONG = SamplingParams(ignore_eos=True, max_tokens=None, n=3)
SHORT = SamplingParams(ignore_eos=True, max_tokens=8, temperature=0.0)


def child_processes() -> set[str]:
    return {
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    }


def signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_left(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a progress bar, which only a terminal shows, and with helpers of the kernels."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    threads, children = set(threading.enumerate()), child_processes()
    handlers = signal_handlers()
    with LLM(tiny_config(num_threads=3)) as llm:
        llm.generate([[1, 2], [3]], SHORT)
        assert len(threading.enumerate()) == len(threads) + 3
    assert set(threading.enumerate()) == threads
    assert child_processes() == children
    assert signal_handlers() == handlers
    assert ("2/2" in capsys.readouterr().err) == terminal


def test_memory_is_given_back() -> None:
    """Weights and KV pool go with close(), also while the LLM itself is still held."""
    llm = LLM(tiny_config())
    llm.generate([1, 2, 3], SHORT, use_tqdm=False)
    runner = engine_of(llm).runner
    pool = [array for cache in runner.kv_caches for array in (cache.keys, cache.values)]
    refs = [weakref.ref(each) for each in (*pool, runner.model)]
    del runner, pool
    llm.close()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 7


def test_no_block_stays_in_use() -> None:
    with LLM(tiny_config()) as llm:
        llm.generate([[1, 2, 3]] * 5, LONG, use_tqdm=False)
        scheduler = engine_of(llm).scheduler
        assert scheduler.num_used_blocks == 0
        scheduler.check_integrity()


EXITING = """
import asyncio, sys
from rawpaged import AsyncEngine, SamplingParams
from rawpaged.config import EngineConfig

async def main(engine):
    params = SamplingParams(max_tokens=None, ignore_eos=True, n=20)
    await anext(engine.generate([1, 2], params))

engine = AsyncEngine(EngineConfig(model=sys.argv[1], num_threads=2, max_model_len=512))
asyncio.run(main(engine))
"""


def test_a_program_may_end_without_closing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXITING, LLAMA],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed() -> None:
    llm = LLM(tiny_config())
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate([1], SHORT, use_tqdm=False)


def test_the_context_closes_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), LLM(tiny_config()) as llm:
        raise ZeroDivisionError
    with pytest.raises(EngineClosedError):
        llm.generate([1], SHORT, use_tqdm=False)


def test_several_threads_at_once(llm: LLM) -> None:
    prompts = [[i] * (i + 1) for i in range(24)]
    expected = [llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs for prompt in prompts]

    def generate(start: int) -> list[list[CompletionOutput]]:
        outputs = llm.generate(prompts[start : start + 6], SHORT, use_tqdm=False)
        return [output.outputs for output in outputs]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(generate, [0, 6, 12, 18]))
    assert [outputs for part in got for outputs in part] == expected


def test_two_at_once(llm: LLM) -> None:
    """Each with helpers of its own, stepping at the same time, over different models."""
    params = SamplingParams(ignore_eos=True, max_tokens=40, seed=1)
    prompts = [[i, i + 1] for i in range(8)]
    expected = llm.generate(prompts, params, use_tqdm=False)

    def generate(each: LLM) -> list[RequestOutput]:
        return each.generate(prompts, params, use_tqdm=False)

    with (
        LLM(tiny_config(num_threads=2)) as one,
        LLM(tiny_config(num_threads=2, dtype="bfloat16")) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        first, second = pool.map(generate, [one, other])
    assert [output.outputs[0].token_ids for output in first] == [
        output.outputs[0].token_ids for output in expected
    ]
    assert first != second


def test_close_while_generating() -> None:
    """The generating thread gets its results, cut short with reason "abort"."""
    llm = LLM(tiny_config(max_num_seqs=4))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, [[1, 2]] * 8, LONG, use_tqdm=False)
        wait_until(lambda: engine_of(llm).scheduler.num_generation_tokens > 8)
        llm.close()
        outputs = future.result(5)
    reasons = [sample.finish_reason for output in outputs for sample in output.outputs]
    assert set(reasons) <= {"length", "abort"}
    assert "abort" in reasons
    assert all(output.finished for output in outputs)
    assert engine_of(llm).scheduler.num_used_blocks == 0


@pytest.mark.parametrize("delay_steps", range(8))
def test_close_at_any_time(delay_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitting, prefilling, decoding: each call ends, with results or EngineClosedError."""
    llm = LLM(tiny_config(max_num_seqs=4, max_num_batched_tokens=16))
    runner = engine_of(llm).runner
    steps = threading.Semaphore(0)
    launch_forward = runner.launch_forward

    def counted(*args: Any) -> Any:
        steps.release()
        return launch_forward(*args)

    monkeypatch.setattr(runner, "launch_forward", counted)
    with ThreadPoolExecutor(3) as pool:
        futures: list[Future[list[RequestOutput]]] = [
            pool.submit(llm.generate, [[i] * 20] * 3, LONG, use_tqdm=False) for i in range(3)
        ]
        for _ in range(delay_steps):
            assert steps.acquire(timeout=5)
        llm.close()
        for future in futures:
            error = future.exception(5)
            assert error is None or isinstance(error, EngineClosedError)


def test_interrupted() -> None:
    """Ctrl-C ends the call; what it had queued is aborted, and the next call works."""
    with LLM(tiny_config()) as llm:
        scheduler = engine_of(llm).scheduler

        def interrupt() -> None:
            wait_until(lambda: scheduler.num_generation_tokens > 20)
            os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2]] * 100, LONG, use_tqdm=False)
            future.result()
        wait_until(lambda: not engine_of(llm).has_unfinished(), 1.0)
        assert scheduler.num_used_blocks == 0
        assert len(llm.generate([1], SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_failed_call_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued before the failure is aborted, and the next call works."""
    with LLM(tiny_config()) as llm:
        launch_forward, calls = ModelRunner.launch_forward, []

        def fail_third(runner: ModelRunner, *args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ZeroDivisionError("boom")
            return launch_forward(runner, *args)

        monkeypatch.setattr(ModelRunner, "launch_forward", fail_third)
        with pytest.raises(Exception, match="boom"):
            llm.generate([[1] * 60] * 10, LONG, use_tqdm=False)
        wait_until(lambda: not engine_of(llm).has_unfinished(), 1.0)
        assert engine_of(llm).scheduler.num_used_blocks == 0
        (output,) = llm.generate([1], SHORT, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
