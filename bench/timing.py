"""Timing of one call at a time, over operands that are not in the caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_FEWEST_CALLS = 5
_MOST_CALLS = 5000
_WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call."""

    calls: int
    median: float
    best: float
    p95: float


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
