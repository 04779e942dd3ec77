"""Nested ranges of time: steps, their phases, layers and ops.

A `Tracer` hands ranges to sinks: a `RangeRecorder` keeps them with their times, a GPU backend's
sink passes them to the device's profiler. A tracer without sinks is off, and its ranges are one
shared object that does nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

RangeKind = Literal["step", "phase", "layer", "op"]
RangeArgs = Mapping[str, object]
"""What is told of a range besides its name; shapes as tuples, everything else a JSON value."""

_NO_ARGS: RangeArgs = {}
_OFF = nullcontext()


class RangeSink(Protocol):
    """Takes ranges that nest: each push has its pop, last in, first out, all on one thread."""

    def push(self, kind: RangeKind, name: str, args: RangeArgs) -> None: ...
    def rename(self, name: str, args: RangeArgs) -> None:
        """What the innermost range is called, now that it is known."""
        ...

    def pop(self) -> None: ...


class Tracer:
    """Makes ranges for all sinks at once; they are entered and left on one thread."""

    def __init__(self, sinks: Sequence[RangeSink] = ()) -> None:
        self._sinks = tuple(sinks)
        self._step = 0
        # A model has few shapes, so that names are made once each.
        self._op_names: dict[tuple[str, tuple[int, ...]], str] = {}

    @property
    def is_on(self) -> bool:
        return bool(self._sinks)

    def step(self, number: int) -> AbstractContextManager[None]:
        """One step; `describe_step` completes its name, when the batch is known."""
        self._step = number
        return self._range("step", f"step={number}") if self._sinks else _OFF

    def describe_step(self, label: str, args: RangeArgs) -> None:
        """Add "prefill=3x512 decode=29" to the name of the step that has begun.

        To be called while no range inside the step is open.
        """
        for sink in self._sinks:
            sink.rename(f"step={self._step} {label}", args)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of a step: schedule, plan, forward, logits, sample, update, detokenise."""
        return self._range("phase", name) if self._sinks else _OFF

    def layer(self, index: int) -> AbstractContextManager[None]:
        return self._range("layer", f"layer {index}", {"layer": index}) if self._sinks else _OFF

    def op(self, op: str, dims: tuple[int, ...], args: RangeArgs) -> AbstractContextManager[None]:
        """One op, named by what it is and its sizes: `linear 32x576x3072`."""
        name = self._op_names.get((op, dims))
        if name is None:
            name = f"{op} {'x'.join(map(str, dims))}"
            self._op_names[op, dims] = name
        return self._range("op", name, args)

    def _range(
        self, kind: RangeKind, name: str, args: RangeArgs = _NO_ARGS
    ) -> AbstractContextManager[None]:
        return _OpenRange(self._sinks, kind, name, args)


class _OpenRange:
    """A range from entering to leaving; also when left by an exception."""

    __slots__ = ("_args", "_kind", "_name", "_sinks")

    def __init__(
        self, sinks: tuple[RangeSink, ...], kind: RangeKind, name: str, args: RangeArgs
    ) -> None:
        self._sinks = sinks
        self._kind = kind
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        for sink in self._sinks:
            sink.push(self._kind, self._name, self._args)

    def __exit__(self, *_: object) -> None:
        # The first one in is the last one out, so that it sees what the others cost.
        for sink in reversed(self._sinks):
            sink.pop()


@dataclass(frozen=True, slots=True)
class Range:
    """A range that has ended; times are those of `time.perf_counter_ns`."""

    kind: RangeKind
    name: str
    args: RangeArgs
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class _Record:
    """A range while it is open; a class of its own because a dataclass is slower to make."""

    __slots__ = ("args", "end_ns", "kind", "name", "start_ns")

    def __init__(self, kind: RangeKind, name: str, args: RangeArgs) -> None:
        self.kind = kind
        self.name = name
        self.args = args
        self.end_ns = 0
        # Read last here and first in `pop`: keeping a range is the time of the one around it.
        self.start_ns = time.perf_counter_ns()


class RangeRecorder:
    """A sink that keeps all ranges, parents before their children."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._open: list[_Record] = []

    def __len__(self) -> int:
        return len(self._records)

    def push(self, kind: RangeKind, name: str, args: RangeArgs) -> None:
        record = _Record(kind, name, args)
        self._records.append(record)
        self._open.append(record)

    def rename(self, name: str, args: RangeArgs) -> None:
        self._open[-1].name = name
        self._open[-1].args = args

    def pop(self) -> None:
        now = time.perf_counter_ns()
        self._open.pop().end_ns = now

    def ranges(self) -> list[Range]:
        """All ranges in the order in which they began; none may be open."""
        assert not self._open, f"{len(self._open)} ranges are open"
        return [
            Range(each.kind, each.name, each.args, each.start_ns, each.end_ns)
            for each in self._records
        ]


def write_chrome_trace(path: Path, ranges: Sequence[Range], about: Mapping[str, object]) -> None:
    """Write the calling thread's ranges as a JSON file for Perfetto and chrome://tracing.

    Times count from the first range, in microseconds with three decimals, so that nothing is
    rounded. `about` goes into `otherData`. The file appears whole or not at all; raises OSError.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)},\n')
            file.write('"traceEvents": [\n')
            file.write(",\n".join(_events(ranges)))
            file.write("\n]}\n")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _events(ranges: Sequence[Range]) -> list[str]:
    """The names of process and thread, then a complete event ("X") for each range."""
    place = {"pid": os.getpid(), "tid": threading.get_native_id()}
    names = {"process_name": "rawpaged", "thread_name": threading.current_thread().name}
    events = [
        json.dumps({"name": kind, "ph": "M", **place, "args": {"name": name}})
        for kind, name in names.items()
    ]
    origin = ranges[0].start_ns if ranges else 0
    for each in ranges:
        event = {
            "name": each.name,
            "cat": each.kind,
            "ph": "X",
            "ts": (each.start_ns - origin) / 1000,
            "dur": each.duration_ns / 1000,
            **place,
            "args": each.args,
        }
        events.append(json.dumps(event))
    return events
