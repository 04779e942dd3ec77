"""How far apart two processors are: whether they have a last-level cache in common.

A virtual machine's processors may be cores of one chiplet now and of two a minute later. Of two,
each word that one thread leaves for another takes three times as long, so that steps of a model,
whose threads share every op, take up to a third longer; but two chiplets read memory faster than
one. Rows tell which it was.
"""

from __future__ import annotations

import time

import numpy as np

from bench.machine import usable_cores
from rawpaged.cpu.atomics import pause
from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.threads import ThreadTeam

_NUM_OPS = 200
_NUM_REPLAYS = 15
_ITEMS, _PAUSES = 18, 10
"""Some 2 us of work in parts that two threads compete for."""


@kernel
def _pause(pauses, start, stop):  # type: ignore[no-untyped-def]
    for _ in range(start, stop):
        for _ in range(pauses):
            pause()  # type: ignore[call-arg]


def measure_handover() -> float | None:
    """Nanoseconds that an op takes two threads beyond half of what it takes one.

    Some 200 on two cores of one chiplet and 700 on cores of two, of a Zen 4. None with a single
    processor. Takes 40 ms. Other work on the machine makes it longer.
    """
    if usable_cores() < 2:
        return None
    alone, shared = (_seconds_of_op(num_threads) for num_threads in (1, 2))
    return 1e9 * (shared - alone / 2)


def _seconds_of_op(num_threads: int) -> float:
    team = ThreadTeam(num_threads)

    def ops() -> None:
        for _ in range(_NUM_OPS):
            team.run(_pause, _ITEMS, _PAUSES)

    try:
        recording = team.record(ops)
        durations = []
        for _ in range(_NUM_REPLAYS):
            started = time.perf_counter()
            team.replay(recording)
            durations.append(time.perf_counter() - started)
        return float(np.median(durations)) / _NUM_OPS
    finally:
        team.close()
