"""Steps that overlap say what steps one after another say, on a device that is late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rawpaged.engine.engine import Engine
from rawpaged.engine.engine_output import EngineOutput
from rawpaged.engine.op_recorder import OpRecorder
from rawpaged.request import FinishReason, Request
from rawpaged.tracing import RangeArgs, RangeKind, RangeRecorder, Tracer
from tests.engine.beams import search
from tests.engine.helpers import poison_free_blocks, request, samples
from tests.gpu.test_engine import gpu_engine
from tests.hostsim.cupy_stand_in import CupyStandIn, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

MODEL = "llama_tied_hd32"


def late_engine(*, async_scheduling: bool = True, **flags: Any) -> Engine:
    """An engine on a device that does nothing before somebody waits for it."""
    device = SimulatedCudaDevice(CupyStandIn(HostLoader("plain")))
    return gpu_engine(MODEL, "bfloat16", device=device, async_scheduling=async_scheduling, **flags)


def prompt(seed: int, length: int) -> list[int]:
    return [(11 * seed + 7 * i + seed * i * i) % 320 for i in range(length)]


@dataclass
class Heard:
    """What came of a request."""

    tokens: list[Any] = field(default_factory=list)
    """(token id, log-probabilities) of each."""
    prompt_logprobs: Any = None
    end: Any = None
    beams: Any = None


class Client:
    """Hears what an engine says, and ends requests after as many tokens as `ends` tells."""

    def __init__(self, engine: Engine, ends: dict[str, tuple[int, FinishReason]]) -> None:
        self.engine = engine
        self.heard: defaultdict[str, Heard] = defaultdict(Heard)
        self._ends = ends

    def add(self, requests: Sequence[Request]) -> None:
        for group in dict.fromkeys(each.group for each in requests):
            self.engine.add_group(group)

    def step(self) -> None:
        for output in self.engine.step():
            self._hear(output)
            number, reason = self._ends.get(output.request_id, (0, FinishReason.ABORT))
            if output.finish_reason is None and len(self.heard[output.request_id].tokens) == number:
                end = self.engine.finish(output.request_id, reason, "as told")
                assert end is not None
                self._hear(end)
        self.engine.scheduler.check_integrity()
        poison_free_blocks(self.engine)

    def drain(self) -> dict[str, Heard]:
        while self.engine.has_unfinished():
            self.step()
        assert self.engine.scheduler.num_used_blocks == 0
        assert self.engine.scheduler.swap_space.block_pool.num_used_blocks == 0
        return dict(self.heard)

    def _hear(self, output: EngineOutput) -> None:
        heard = self.heard[output.request_id]
        assert heard.end is None, f"{output.request_id} has ended"
        if output.token_id is not None:
            heard.tokens.append((output.token_id, output.logprobs))
        heard.prompt_logprobs = heard.prompt_logprobs or output.prompt_logprobs
        heard.beams = output.beams
        if output.finish_reason is not None:
            heard.end = (output.finish_reason, output.stop_reason, output.error)


def crowd() -> list[list[Request]]:
    """Of every kind, in the order in which they come, a few steps apart."""
    shared = prompt(1, 33)
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    penalties: dict[str, Any] = {"frequency_penalty": 0.7, "presence_penalty": 0.3}
    penalties["repetition_penalty"] = 1.3
    return [
        [
            request("greedy", shared, max_tokens=8, logprobs=2),
            request("drawn", prompt(2, 12), max_tokens=7, **drawn, **penalties, top_p=0.9),
        ],
        [request("again", [*shared, 4, 5], max_tokens=4, min_tokens=3, ignore_eos=False)],
        samples("forked", 3, prompt(3, 30), max_tokens=5, logprobs=1, **drawn),
        [
            request("stops", prompt(4, 9), max_tokens=30, logprobs=0, stop_token_ids=STOPS),
            request("told", prompt(5, 17), max_tokens=30),
            request("aborted", prompt(6, 13), max_tokens=30),
        ],
        [request("scored", prompt(7, 20), max_tokens=2, prompt_logprobs=1, logit_bias={5: 3.0})],
        search("beam", prompt(9, 18), n=2, max_tokens=3).requests,
        [request("one", prompt(8, 2), max_tokens=1, logprobs=1)],
    ]


STOPS = [153, 188]
"""Of which one is among the first tokens that the checkpoint says."""
ENDS = {"told": (4, FinishReason.STOP), "aborted": (6, FinishReason.ABORT)}


def serve(engine: Engine) -> dict[str, Heard]:
    client = Client(engine, ENDS)
    for requests in crowd():
        client.add(requests)
        for _ in range(2):
            client.step()
    return client.drain()


@pytest.fixture(scope="module")
def expected() -> dict[str, Heard]:
    """What everybody hears when a step follows the other, with room for all."""
    engine = late_engine(async_scheduling=False, batch_invariant=True, enforce_eager=False)
    heard = serve(engine)
    engine.close()
    assert heard["stops"].end[0] is FinishReason.STOP
    assert len(heard["stops"].tokens) > 2, "it should stop while steps overlap"
    assert heard["again"].end is not None
    assert heard["beam-0"].beams
    assert heard["scored"].prompt_logprobs
    return heard


@pytest.mark.parametrize(
    "flags",
    [
        {"enforce_eager": True, "num_blocks": 5, "budget": 16},
        {"enforce_eager": False, "num_blocks": 5, "num_host_blocks": 12},
    ],
    ids=["eager, chunks, recomputed", "graphs, swapped"],
)
def test_everybody_hears_the_same(flags: dict[str, Any], expected: dict[str, Heard]) -> None:
    engine = late_engine(batch_invariant=True, **flags)
    heard = serve(engine)
    assert heard == expected
    scheduler = engine.scheduler
    stats = scheduler.kv_stats()
    assert stats.num_forks > 0
    assert stats.num_block_copies > 0
    assert scheduler.num_preemptions > 0
    assert (stats.num_swapped_in_blocks > 0) == ("num_host_blocks" in flags)
    assert scheduler.prefix_cache_hits > 0
    lengths = {name: len(each.tokens) for name, each in heard.items() if not each.beams}
    num_beam_tokens = scheduler.num_generation_tokens - sum(lengths.values())
    assert 0 < num_beam_tokens <= 2 * 3, "tokens that were sampled in vain have been counted"
    engine.close()


class Order:
    """A sink that notes how far the device was when each phase began and ended."""

    def __init__(self, stream: Any) -> None:
        self.phases: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
        """(name, (launched, done) at its beginning, and at its end)."""
        self._stream = stream
        self._open: list[tuple[str, tuple[int, int]]] = []

    def push(self, kind: RangeKind, name: str, args: RangeArgs) -> None:
        self._open.append((name if kind == "phase" else "", self._now()))

    def rename(self, name: str, args: RangeArgs) -> None:
        pass

    def pop(self) -> None:
        name, began = self._open.pop()
        if name:
            self.phases.append((name, began, self._now()))

    def _now(self) -> tuple[int, int]:
        return self._stream.num_submitted, self._stream.num_run


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_the_host_works_while_the_device_has_work(enforce_eager: bool) -> None:
    """A step is scheduled and launched before anything of the step before is computed, and the
    tokens of that are booked while the new forward pass has not begun."""
    engine = late_engine(enforce_eager=enforce_eager)
    for i in range(2):
        engine.add_request(request(str(i), prompt(i, 5), max_tokens=8, logprobs=1))
    order = Order(engine.runner.backend.device._stream)  # type: ignore[attr-defined]
    for _ in range(3):
        engine.step()
    engine.set_tracer(Tracer([order]))
    num_steps = 4
    for _ in range(num_steps):
        assert len(engine.step()) == 2
    engine.set_tracer(Tracer())
    forward = ["plan", "forward", "logits"] if enforce_eager else ["graph"]
    names = [name for name, _, _ in order.phases]
    assert names == ["schedule", *forward, "wait", "update", "sample"] * num_steps
    size = len(names) // num_steps
    last_launched = 0
    for step in range(num_steps):
        phases = {name: (began, end) for name, began, end in order.phases[step * size :][:size]}
        began, end = phases["schedule"][0], phases[forward[-1]][1]
        assert began[1] == end[1], "the host has waited before its new step was launched"
        assert began[1] <= last_launched or step == 0, "the step before has begun"
        last_launched = began[0]
        for name in ("wait", "update", "sample"):
            done = phases[name][1][1]
            assert began[1] < done <= began[0] < end[0], f"{name} has waited for the new step"
    while engine.has_unfinished():
        engine.step()
    engine.close()


def test_no_more_than_one_step_is_under_way() -> None:
    """Also while chunks of a prompt are computed, of which nothing is sampled."""
    engine = late_engine(budget=8)
    stream = engine.runner.backend.device._stream  # type: ignore[attr-defined]
    engine.add_request(request("a", prompt(1, 50), max_tokens=3))
    places = [0, 0]
    while engine.has_unfinished():
        engine.step()
        assert stream.num_run >= places[-1], "the step before the last one is not over"
        places.append(stream.num_submitted)
        if engine.has_unfinished():
            assert stream.num_run < places[-1], "the last one has been waited for"
    assert len(places) > 9
    engine.close()


def test_on_its_own_a_step_is_waited_for() -> None:
    engine = late_engine(async_scheduling=False)
    assert not engine.runner.runs_ahead
    engine.add_request(request("a", prompt(1, 5), max_tokens=2))
    assert [output.request_id for output in engine.step()] == ["a"]
    assert len(engine.step()) == 1
    assert not engine.has_unfinished()
    engine.close()


def short_request(name: str) -> Request:
    return request(name, prompt(3, 6), max_tokens=3, logprobs=1)


@pytest.fixture(scope="module")
def alone() -> Heard:
    """What a short request hears that has the engine to itself."""
    client = Client(late_engine(), {})
    client.add([short_request("a")])
    heard = client.drain()["a"]
    client.engine.close()
    return heard


def fail_once(monkeypatch: pytest.MonkeyPatch, engine: Engine, method: str, *, after: int) -> None:
    """The runner's method raises, once, after so many calls that went well."""
    rightly: Callable[..., Any] = getattr(engine.runner, method)
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == after + 1:
            raise MemoryError("no memory left")
        return rightly(*args)

    monkeypatch.setattr(engine.runner, method, fail)


@pytest.mark.parametrize(
    ("method", "num_tokens"),
    # Of the step before the failed one the tokens are heard, unless it is that which failed.
    [("launch_forward", 3), ("launch_sampling", 3), ("result", 3)],
)
def test_a_step_that_fails_under_way(
    method: str, num_tokens: int, alone: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests and those of the step behind it fail; who waited is served."""
    engine = late_engine(num_blocks=2)
    client = Client(engine, {})
    client.add([request("fails", prompt(1, 20), max_tokens=9)])
    client.step()
    client.add([short_request("waits")])
    assert engine.scheduler.num_running == 1
    fail_once(monkeypatch, engine, method, after=num_tokens if method == "result" else 2)
    heard = client.drain()
    assert len(heard["fails"].tokens) == num_tokens
    reason, _, error = heard["fails"].end
    assert reason is FinishReason.ERROR
    assert "out of memory in a step of 1 request," in error
    assert heard["waits"] == alone
    engine.close()


def test_a_name_that_is_used_again_while_a_step_is_under_way(alone: Heard) -> None:
    client = Client(late_engine(), {})
    client.add([request("a", prompt(1, 5), max_tokens=9, prompt_logprobs=1)])
    client.step()
    assert client.engine.finish("a", FinishReason.ABORT) is not None
    client.add([short_request("a")])
    assert client.drain()["a"] == alone
    client.engine.close()


def test_sleep_and_close_with_a_step_under_way() -> None:
    engine = late_engine(enforce_eager=False)
    memory = engine.runner.backend.device.stand_in.memory[0]  # type: ignore[attr-defined]
    heard = []
    for number in range(2):
        client = Client(engine, {})
        client.add([request("a", prompt(1, 5), max_tokens=4, logprobs=1)])
        heard.append(client.drain())
        engine.add_request(request("b", prompt(2, 5), max_tokens=4))
        engine.step()
        engine.finish("b", FinishReason.ABORT)
        assert engine.has_unfinished(), "a step is under way"
        if number == 0:
            engine.sleep(1)
            assert not engine.has_unfinished()
            assert memory.pinned == 0
            engine.wake_up()
    assert heard[0] == heard[1]
    engine.runner._on_device.clear()  # type: ignore[attr-defined]
    engine.close()
    assert (memory.used, memory.cached, memory.pinned) == (0, 0, 0)


def test_recorded_steps_do_not_overlap() -> None:
    """What a recording needs is looked at, which waits; the tokens are the same."""
    heard = []
    for is_recorded in (True, False):
        engine = late_engine(enforce_eager=False)
        client = Client(engine, {})
        client.add([request("a", prompt(1, 5), max_tokens=8, logprobs=1)])
        for _ in range(3):
            client.step()
        if is_recorded:
            recorder = OpRecorder(engine.runner.backend)
            tracer = Tracer([recorder, RangeRecorder()])
            engine.set_tracer(tracer, recorder)
            for number in range(3):
                with tracer.step(number):
                    client.step()
                assert engine._under_way is None
            engine.set_tracer(Tracer())
            assert len(recorder.recording().steps) == 3
        heard.append(client.drain())
        engine.close()
    assert heard[0] == heard[1]
