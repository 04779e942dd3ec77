"""Memory of the device over an engine's life, by the counters of the stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from rawpaged.engine.engine import Engine
from rawpaged.errors import BackendError
from rawpaged.request import Request
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import load_weights
from tests.engine.helpers import TINY, recorded_logits, request, run
from tests.gpu.test_engine import gpu_engine
from tests.hostsim.cupy_stand_in import CupyStandIn, Memory, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

MODEL = "llama_tied_hd32"


@dataclass
class Opened:
    engine: Engine
    memory: Memory


@pytest.fixture(
    params=[(True, False), (False, False), (False, True)],
    ids=["eager", "graphs", "graphs, overlapping"],
)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    enforce_eager, async_scheduling = request.param
    device = SimulatedCudaDevice(CupyStandIn(HostLoader("plain")))
    engine = gpu_engine(
        MODEL,
        "bfloat16",
        device=device,
        enforce_eager=enforce_eager,
        async_scheduling=async_scheduling,
    )
    checkpoint = open_checkpoint(str(TINY / MODEL))
    engine.runner._reload_weights = lambda: load_weights(checkpoint, engine.runner.backend)
    yield Opened(engine, device.stand_in.memory[0])
    engine.close()


def generate(engine: Engine, name: str) -> list[bytes]:
    """Rows of logits."""
    run(engine, [request(name, [3, 4, 5, 6, 7], max_tokens=3)])
    return recorded_logits(engine)[name]


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_leaves_the_device_alone(opened: Opened, level: int) -> None:
    engine, memory = opened.engine, opened.memory
    before = generate(engine, "before")
    weights = engine.runner.model.weights.nbytes
    pools = sum(cache.keys.nbytes + cache.values.nbytes for cache in engine.runner.kv_caches)
    awake = memory.used
    engine.sleep(level)
    # Workspaces of launchers stay.
    assert awake - memory.used > weights + pools
    assert memory.cached == memory.pinned == 0
    asleep = memory.used
    engine.wake_up()
    assert memory.used == awake
    assert generate(engine, "after") == before
    engine.sleep(level)
    assert memory.used == asleep


def test_failing_to_wake_takes_nothing(opened: Opened) -> None:
    """Every third allocation finds no memory in turn: the engine sleeps on, and wakes later."""
    engine, memory = opened.engine, opened.memory
    before = generate(engine, "before")
    engine.sleep(1)
    asleep = memory.used
    memory.fail_at = memory.num_allocations
    failures = 0
    while engine.sleep_level:
        with suppress(BackendError):
            engine.wake_up()
            break
        failures += 1
        assert (memory.used, memory.cached) == (asleep, 0)
        memory.fail_at = memory.num_allocations + 3 * failures
    memory.fail_at = None
    assert failures > 10
    assert generate(engine, "after") == before


def test_whichever_allocation_of_a_step_fails(opened: Opened) -> None:
    """It fails the step's requests; nothing of the step stays, and the next are served."""
    engine, memory = opened.engine, opened.memory
    before = generate(engine, "before")
    used = []
    num_failed = 0
    while True:
        memory.fail_at = memory.num_allocations + num_failed
        errors = []
        for each in requests(f"failing-{num_failed}"):
            engine.add_request(each)
        while engine.has_unfinished():
            errors += [output.error for output in engine.step() if output.error is not None]
        engine.scheduler.check_integrity()
        assert engine.scheduler.num_used_blocks == 0
        if not errors:
            break
        num_failed += 1
        assert all("out of memory in a step of" in error for error in errors)
        if engine.runner.runs_ahead:
            # The step before has ended since, and its results came through pinned memory.
            recorded_logits(engine)
            engine.runner.backend.release_unused()
            assert memory.pinned <= 4096
        else:
            assert memory.pinned == 0
        assert memory.cached == 0
        used.append(memory.used)
    memory.fail_at = None
    assert num_failed >= 6
    assert generate(engine, "after") == before
    engine.runner.backend.release_unused()
    # What is kept for later steps is there when all has gone well.
    assert max(used) <= memory.used


def requests(name: str) -> list[Request]:
    """Two that between them use every op."""
    return [
        request(f"{name}-a", range(3, 8), max_tokens=2, logprobs=2, frequency_penalty=0.5),
        request(f"{name}-b", [5, 6, 7], max_tokens=2, prompt_logprobs=1, temperature=1.0, seed=1),
    ]


def test_decode_steps_allocate_nothing(opened: Opened) -> None:
    """Nor does sampling with penalties and log-probabilities, once a step has been as large."""
    engine, memory = opened.engine, opened.memory
    is_eager = engine.runner._graphs is None
    params: dict[str, Any] = {"logprobs": 2, "frequency_penalty": 0.5, "temperature": 1.0}
    for name, prompt in (("a", [3, 4, 5]), ("b", [6, 7])):
        engine.add_request(request(name, prompt, max_tokens=10, **params))
    engine.runner._keep = lambda step: None  # type: ignore[attr-defined]
    counts = []
    while engine.has_unfinished():
        before = memory.num_allocations
        engine.step()
        counts.append(memory.num_allocations - before)
    # Where steps overlap, the first call brings nothing and the last launches nothing.
    assert len(counts) == 10 + engine.runner.runs_ahead
    assert counts[0] > 0
    # Without graphs, a step's index arrays are one allocation.
    assert set(counts[2:]) == {1 if is_eager else 0}


@pytest.mark.parametrize("is_used", [True, False])
def test_closing_leaves_nothing(is_used: bool) -> None:
    device = SimulatedCudaDevice(CupyStandIn(HostLoader("plain")))
    memory = device.stand_in.memory[0]
    engine = gpu_engine(MODEL, "bfloat16", device=device, enforce_eager=False)
    if is_used:
        run(engine, requests("some"))
    assert memory.used > 0
    assert memory.pinned > 0
    engine.close()
    assert (memory.used, memory.cached, memory.pinned) == (0, 0, 0)
