"""Timing of calls over operands that are not in the caches, one by one or recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

_FEWEST_CALLS = 5
_MOST_CALLS = 5000
_WARM_UP_CALLS = 3
_RECORDED_SECONDS = 0.5e-3
"""Of calls in a recording, about: enough for its own beginning and end not to count."""
_MOST_RECORDED = 200


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call."""

    calls: int
    median: float
    best: float
    p95: float

    def microseconds(self) -> dict[str, float]:
        """The fields that a row has of it."""
        return {
            "calls": self.calls,
            "median_us": 1e6 * self.median,
            "min_us": 1e6 * self.best,
            "p95_us": 1e6 * self.p95,
        }


def time_calls(calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
    """Call them in turn for about `seconds`, at least five times in all.

    The calls do the same work on different memory, so that each finds its operands as far away
    as the caller's choice of copies makes them. Nothing runs in between: helper threads are as
    awake as they are inside of a model.
    """
    for call in calls[:_WARM_UP_CALLS]:
        call()
    durations: list[int] = []
    spent = 0
    while len(durations) < _FEWEST_CALLS or (
        spent < 1e9 * seconds and len(durations) < _MOST_CALLS
    ):
        call = calls[len(durations) % len(calls)]
        before = time.perf_counter_ns()
        call()
        durations.append(time.perf_counter_ns() - before)
        spent += durations[-1]
    taken = np.asarray(durations, np.float64) / 1e9
    return Timing(
        len(durations), float(np.median(taken)), float(taken.min()), float(np.percentile(taken, 95))
    )


def time_recorded(
    capture: Callable[[Callable[[], None]], Callable[[], None]],
    calls: Sequence[Callable[[], object]],
    seconds: float,
) -> Timing:
    """As `time_calls`, of calls as a model's steps make them: recorded, and repeated in a row.

    `capture` is a backend's. Times are those of a recording divided by the number of its calls.
    """
    once = time_calls(calls, 0).best
    size = min(_MOST_RECORDED, max(1, math.ceil(_RECORDED_SECONDS / once)))
    in_turn = cycle(calls)

    def call(some: Sequence[Callable[[], object]]) -> None:
        for each in some:
            each()

    recordings = []
    for _ in range(math.ceil(len(calls) / size)):
        some = list(islice(in_turn, size))
        recordings.append(capture(lambda some=some: call(some)))  # type: ignore[misc]
    timing = time_calls(recordings, seconds)
    return Timing(
        timing.calls * size, timing.median / size, timing.best / size, timing.p95 / size
    )
