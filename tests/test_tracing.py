"""Ranges nest, keep their times, reach trace files and NVTX; without sinks nothing happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rawpaged.gpu.profiler import CudaProfiler, NvtxRanges
from rawpaged.tracing import Range, RangeRecorder, Tracer, write_chrome_trace


class Calls:
    """A sink that writes down what it hears, into a list that others may share."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def push(self, kind: str, name: str, args: Mapping[str, object]) -> None:
        self._log.append(f"{self._name} push {kind} {name} {dict(args)}")

    def rename(self, name: str, args: Mapping[str, object]) -> None:
        self._log.append(f"{self._name} rename {name} {dict(args)}")

    def pop(self) -> None:
        self._log.append(f"{self._name} pop")


def test_a_tracer_without_sinks_hands_out_one_object() -> None:
    tracer = Tracer()
    assert not tracer.is_on
    off = tracer.step(1)
    assert tracer.phase("plan") is off
    assert tracer.layer(3) is off
    with off, tracer.phase("forward"), tracer.layer(0):
        pass


def test_sinks_nest() -> None:
    log: list[str] = []
    tracer = Tracer([Calls("a", log), Calls("b", log)])
    assert tracer.is_on
    with tracer.step(7):
        tracer.describe_step("prefill=0 decode=2", {"num_requests": 2})
        with tracer.phase("forward"), tracer.layer(1):
            pass
        with tracer.op("linear", (2, 3, 4), {"x": (2, 3)}):
            pass
    assert log == [
        "a push step step=7 {}",
        "b push step step=7 {}",
        "a rename step=7 prefill=0 decode=2 {'num_requests': 2}",
        "b rename step=7 prefill=0 decode=2 {'num_requests': 2}",
        "a push phase forward {}",
        "b push phase forward {}",
        "a push layer layer 1 {'layer': 1}",
        "b push layer layer 1 {'layer': 1}",
        *["b pop", "a pop"] * 2,
        "a push op linear 2x3x4 {'x': (2, 3)}",
        "b push op linear 2x3x4 {'x': (2, 3)}",
        *["b pop", "a pop"] * 2,
    ]


def test_an_exception_closes_its_ranges() -> None:
    recorder = RangeRecorder()
    tracer = Tracer([recorder])
    with pytest.raises(ZeroDivisionError), tracer.step(1), tracer.phase("plan"):
        raise ZeroDivisionError
    step, phase = recorder.ranges()
    assert step.start_ns <= phase.start_ns <= phase.end_ns <= step.end_ns


def test_recorded_in_order_of_beginning() -> None:
    recorder = RangeRecorder()
    tracer = Tracer([recorder])
    with tracer.step(1):
        tracer.describe_step("x", {"n": 1})
        with tracer.phase("a"):
            pass
        with tracer.phase("b"), tracer.layer(0):
            pass
    ranges = recorder.ranges()
    assert [(each.kind, each.name) for each in ranges] == [
        ("step", "step=1 x"),
        ("phase", "a"),
        ("phase", "b"),
        ("layer", "layer 0"),
    ]
    assert ranges[0].args == {"n": 1}
    assert len(recorder) == 4


def test_chrome_trace(tmp_path: Path) -> None:
    ranges = [
        Range("step", 'step=1 "quoted"\n', {"num_tokens": 3}, 10**15 + 1, 10**15 + 10_001),
        Range("op", "linear 3x4x5", {"x": (3, 4)}, 10**15 + 2, 10**15 + 1_237),
    ]
    path = tmp_path / "trace.json"
    write_chrome_trace(path, ranges, {"device": "cpu"})
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"device": "cpu"}
    process, thread, step, op = trace["traceEvents"]
    assert (process["ph"], process["name"]) == ("M", "process_name")
    assert (thread["ph"], thread["args"]) == ("M", {"name": "MainThread"})
    places = {(event["pid"], event["tid"]) for event in trace["traceEvents"]}
    assert len(places) == 1
    assert (step["ph"], step["cat"], step["name"]) == ("X", "step", 'step=1 "quoted"\n')
    assert (step["ts"], step["dur"], step["args"]) == (0, 10, {"num_tokens": 3})
    assert (op["ts"], op["dur"], op["args"]) == (0.001, 1.235, {"x": [3, 4]})
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_without_ranges(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", [], {})
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 2


def test_a_trace_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("old")
    with pytest.raises(TypeError):
        write_chrome_trace(tmp_path / "trace.json", [Range("op", "x", {"x": object()}, 0, 1)], {})
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "old"


class FakeCuda:
    """The part of CuPy that profiling uses; says what was called."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, *, broken: bool = False) -> None:
        self.log: list[str] = []
        self._broken = broken
        runtime = SimpleNamespace(
            CUDARuntimeError=self.CUDARuntimeError,
            profilerStart=lambda: self._profiler("start"),
            profilerStop=lambda: self._profiler("stop"),
        )
        nvtx = SimpleNamespace(
            RangePush=lambda message, colour: self.log.append(f"{message} {colour}"),
            RangePop=lambda: self.log.append("pop"),
        )
        self.cuda: Any = SimpleNamespace(runtime=runtime, nvtx=nvtx)

    def _profiler(self, what: str) -> None:
        self.log.append(what)
        if self._broken:
            raise self.CUDARuntimeError("no driver")


def test_nvtx_ranges_are_balanced() -> None:
    cuda = FakeCuda()
    profiler = CudaProfiler(cuda)
    tracer = Tracer([profiler.start()])
    with tracer.step(812):
        with tracer.phase("schedule"):
            pass
        tracer.describe_step("prefill=3x512 decode=29", {})
        with tracer.layer(0):
            pass
    profiler.stop()
    assert cuda.log == [
        "start",
        "step=812 0",
        "schedule 1",
        "pop",
        "pop",
        "step=812 prefill=3x512 decode=29 0",
        "layer 0 2",
        "pop",
        "pop",
        "stop",
    ]


def test_a_cuda_profiler_that_fails_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    profiler = CudaProfiler(FakeCuda(broken=True))
    assert isinstance(profiler.start(), NvtxRanges)
    profiler.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
