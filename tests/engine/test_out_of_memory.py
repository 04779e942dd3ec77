"""A step that finds no memory fails its requests, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawpaged import LLM
from rawpaged.engine.engine import Engine
from rawpaged.errors import EngineClosedError, RequestFailedError
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from tests.engine.failing_memory import failing_memory
from tests.engine.helpers import recorded_logits, request, run, tiny_engine
from tests.tiny import engine_of, tiny_config, wait_until


def test_the_handler_counts_and_fails() -> None:
    memory = failing_memory()
    with memory.failing(None):
        kept = np.zeros(100) + 1
    assert memory.count >= 2
    with memory.failing(1):
        np.empty(10)
        with pytest.raises(MemoryError):
            np.empty(10)
        np.empty(10)
    assert kept.sum() == 100


def requests(name: str) -> list[Request]:
    """Two that between them use every op: prompts in chunks, penalties, log-probabilities."""
    return [
        request(f"{name}-a", range(3, 40), max_tokens=3, logprobs=2, frequency_penalty=0.5),
        request(f"{name}-b", [5, 6, 7], max_tokens=3, prompt_logprobs=1, temperature=1.0, seed=1),
    ]


def run_to_the_end(engine: Engine, name: str) -> list[str]:
    """Errors of the requests."""
    for each in requests(name):
        engine.add_request(each)
    errors = []
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                errors.append(output.error)
    return errors


def logits_of(engine: Engine, name: str) -> list[list[bytes]]:
    run(engine, requests(name))
    rows = recorded_logits(engine)
    return [rows[f"{name}-{which}"] for which in "ab"]


def test_whichever_allocation_fails() -> None:
    """Each of NumPy's in turn, up to a run without any that fails."""
    engine = tiny_engine(max_num_batched_tokens=32)
    memory = failing_memory()
    expected = logits_of(engine, "expected")
    after = num_failed = 0
    while True:
        with memory.failing(after):
            errors = run_to_the_end(engine, f"failing-{after}")
        engine.scheduler.check_integrity()
        assert engine.scheduler.num_used_blocks == 0
        if memory.count <= after:
            assert not errors
            break
        num_failed += bool(errors)
        assert all(error.startswith("out of memory in a step of") for error in errors), errors
        if after % 29 == 0:
            assert logits_of(engine, f"fine-{after}") == expected
        after += 1
    assert logits_of(engine, "last") == expected
    # Some are of what tests record and of what does without.
    assert num_failed > 0.9 * after > 100
    engine.close()


def test_a_user_is_told_and_the_next_one_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("Unable to allocate 8.0 GiB")

    params = SamplingParams(max_tokens=3, temperature=0.0)
    expected = llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs
    monkeypatch.setattr(engine_of(llm).runner.backend, "sample", fail)
    with pytest.raises(RequestFailedError, match=r"out of memory.*8\.0 GiB.*max_num_seqs"):
        llm.generate([[3, 4, 5]], params, use_tqdm=False)
    monkeypatch.undo()
    assert llm.generate([[3, 4, 5]], params, use_tqdm=False)[0].outputs == expected


def test_a_step_that_failed_keeps_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is released once the step's frames are gone, and with them its arrays."""
    backend, alive = engine_of(llm).runner.backend, [0]
    seen: list[int] = []

    class Counted:
        def __init__(self) -> None:
            alive[0] += 1

        def __del__(self) -> None:
            alive[0] -= 1

    def fail(*_: Any) -> None:
        held = Counted()
        raise MemoryError(f"planted while {type(held).__name__} is held")

    monkeypatch.setattr(backend, "sample", fail)
    monkeypatch.setattr(backend, "release_unused", lambda: seen.append(alive[0]))
    with pytest.raises(RequestFailedError):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert seen == [0]


def test_a_device_that_is_lost_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that /health tells: nothing that comes later could be served."""

    def fail(*_: Any) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    llm = LLM(tiny_config())
    backend = engine_of(llm).runner.backend
    for name in ("sample", "release_unused"):
        monkeypatch.setattr(backend, name, fail)
    with pytest.raises(RequestFailedError, match="the engine died"):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    wait_until(lambda: not llm._thread.is_running)
    with pytest.raises(EngineClosedError):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
    llm.close()


def test_closing_a_lost_device_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(tiny_config())
    close = engine_of(llm).close

    def fail() -> None:
        close()
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(engine_of(llm), "close", fail)
    llm.close()
    assert "did not end in order" in caplog.text
