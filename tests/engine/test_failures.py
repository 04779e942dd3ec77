"""What fails inside the engine fails alone, with an error for each who waits."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rawpaged import LLM, AsyncEngine
from rawpaged.engine import loading
from rawpaged.errors import EngineClosedError, RequestFailedError
from rawpaged.outputs import RequestOutput
from rawpaged.scheduler.scheduler import Scheduler
from tests.engine.test_async_engine import ENDLESS, PROMPT, final, params, run
from tests.tiny import LLAMA, Records, engine_of, tiny_config, wait_until

BROKEN_TOKEN = 7

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def engine(records: Records) -> Iterator[AsyncEngine]:
    with AsyncEngine(tiny_config(max_num_seqs=4), stats_logger=records) as opened:
        yield opened


def fail_once(monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine) -> None:
    """The next step raises, as the kernels would when memory is gone."""
    runner = engine_of(engine).runner

    def fail(*args: Any) -> Any:
        monkeypatch.undo()
        raise MemoryError("no memory left")

    monkeypatch.setattr(runner, "launch_forward", fail)


async def outcome(stream: Any) -> RequestOutput | Exception:
    """The last output, or what the stream raised."""
    try:
        outputs = [output async for output in stream]
    except Exception as error:
        return error
    last = outputs[-1]
    assert isinstance(last, RequestOutput)
    return last


def test_a_step_that_raises(
    engine: AsyncEngine, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its four requests fail; those that waited and those that come later do not."""

    async def main() -> None:
        expected = await final(engine)
        fail_once(monkeypatch, engine)
        streams = [engine.generate(PROMPT, params()) for _ in range(7)]
        results = [await outcome(stream) for stream in streams]
        # The first step may have begun before all had arrived, but never holds more than four.
        failed = [result for result in results if isinstance(result, RequestFailedError)]
        assert 1 <= len(failed) <= 4
        assert results[: len(failed)] == failed
        assert all("no memory left" in str(error) for error in failed)
        for result in results[len(failed) :]:
            assert isinstance(result, RequestOutput)
            assert result.outputs == expected.outputs
        assert (await final(engine)).outputs == expected.outputs
        assert [s.finish_reason for s in records.requests].count("error") == len(failed)

    run(main())
    assert engine.is_running
    wait_until(lambda: records.is_idle, 1.0)
    engine_of(engine).scheduler.check_integrity()


def test_a_request_fails_with_all_its_samples(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples that were not in the failed step end too, and the id is free again."""
    with AsyncEngine(tiny_config(max_num_seqs=1), stats_logger=records) as engine:

        async def main() -> None:
            fail_once(monkeypatch, engine)
            result = await outcome(engine.generate(PROMPT, ENDLESS, request_id="x"))
            assert isinstance(result, RequestFailedError)
            result = await outcome(engine.generate(PROMPT, params(n=2), request_id="x"))
            assert isinstance(result, RequestOutput)
            assert [len(sample.token_ids) for sample in result.outputs] == [8, 8]

        run(main())
        assert [stats.finish_reason for stats in records.requests] == [
            "error", "error", "length", "length",
        ]  # fmt: skip
        wait_until(lambda: records.is_idle, 1.0)


def broken_checkpoint(directory: Path) -> str:
    """The tiny Llama with NaN as one token's embedding."""
    shutil.copytree(LLAMA, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN_TOKEN] = np.nan
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_fails_its_request_only(tmp_path: Path, temperature: float) -> None:
    """In one batch with others, whose blocks may be those that held NaN before."""
    good = [[i, i + 1] for i in range(20, 40)]
    bad = [[1, BROKEN_TOKEN], [BROKEN_TOKEN] * 40, [*range(8, 60), BROKEN_TOKEN]]
    given = params(temperature=temperature, seed=1, logit_bias={BROKEN_TOKEN: -100.0}, logprobs=1)
    with LLM(tiny_config()) as llm:
        expected = [output.outputs for output in llm.generate(good, given, use_tqdm=False)]
    config = tiny_config(model=broken_checkpoint(tmp_path), num_gpu_blocks_override=16)
    with AsyncEngine(config) as engine:

        async def main() -> None:
            for _ in range(3):
                streams = [engine.generate(prompt, given) for prompt in [*bad, *good, *bad]]
                results = [await outcome(stream) for stream in streams]
                for result in results[:3] + results[-3:]:
                    assert isinstance(result, RequestFailedError)
                    assert "not finite" in str(result)
                outputs = [r.outputs for r in results if isinstance(r, RequestOutput)]
                assert outputs == expected

        run(main())
        assert engine_of(engine).scheduler.num_used_blocks == 0


def die(*args: object) -> Any:
    raise ZeroDivisionError("a fault in the engine itself")


@pytest.mark.parametrize("method", ["schedule", "complete"])
def test_the_thread_dies(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """All requests fail, later ones are refused, and closing works."""

    async def main() -> None:
        first = engine.generate(PROMPT, ENDLESS)
        await anext(first)
        monkeypatch.setattr(Scheduler, method, die)
        streams: list[Any] = [first]
        with contextlib.suppress(EngineClosedError):
            streams += [engine.generate(PROMPT, params()) for _ in range(6)]
        errors = [await outcome(stream) for stream in streams]
        for error in errors:
            assert isinstance(error, (RequestFailedError, EngineClosedError))
        assert len({id(error) for error in errors}) == len(errors)
        wait_until(lambda: not engine.is_running, 1.0)
        with pytest.raises(EngineClosedError):
            engine.generate(PROMPT, params())

    run(main())
    engine.close()


def test_a_dead_thread_fails_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_config()) as llm:
        monkeypatch.setattr(Scheduler, "complete", die)
        with pytest.raises((RequestFailedError, EngineClosedError)):
            llm.generate([PROMPT] * 5, params(), use_tqdm=False)


def test_loading_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(loading, "warm_up", die)
    with pytest.raises(ZeroDivisionError):
        LLM(tiny_config(num_threads=4))
    assert set(threading.enumerate()) == before
