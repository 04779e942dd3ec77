"""Times of work on a device: graphs of calls between two events, operands not in its caches.

A launch out of Python takes longer than many kernels do, so calls are captured in a graph, which
is replayed and timed as a whole, divided by the calls in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.target import Target
from bench.timing import Timing

_WARM_UP_CALLS = 2
_GRAPH_SECONDS = 2e-3
"""A graph's calls take about this long, so that its own launch does not count."""
_MOST_CALLS = 1000
_MOST_COPIES = 512
_MOST_REPLAYS = 200


@dataclass(frozen=True, slots=True)
class Work:
    """What one call has to move and to compute at least."""

    num_bytes: int
    num_flops: int = 0


def cold_copies(target: Target, num_bytes: int) -> int:
    """Copies of that many bytes that together exceed the cache four times; 1 in the simulator."""
    if target.is_simulated:
        return 1
    return min(_MOST_COPIES, max(1, -(-4 * target.cache_bytes // max(num_bytes, 1))))


def time_device(target: Target, calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
    """Replay the calls, the same work on different memory, for about `seconds`.

    Calls queue work and do not wait for it. The first ones run once before, to compile.
    """
    for call in calls[:_WARM_UP_CALLS]:
        call()
    target.device.synchronize()
    if target.is_simulated:
        return time_replays(target.seconds, _in_turn(calls, 1), seconds, len(calls), fewest=1)
    rounds = graph_rounds(target.seconds(_in_turn(calls[:1], 1)), len(calls))
    replay = target.device.capture(_in_turn(calls, rounds))
    replay()
    return time_replays(target.seconds, replay, seconds, rounds * len(calls))


def time_queued(target: Target, calls: Sequence[Callable[[], object]], seconds: float) -> Timing:
    """As `time_device`, but without a graph: with what launches and copies cost the host."""
    for call in calls[:_WARM_UP_CALLS]:
        call()
    target.device.synchronize()
    fewest = 1 if target.is_simulated else 5
    return time_replays(target.seconds, _in_turn(calls, 1), seconds, len(calls), fewest=fewest)


def graph_rounds(call_seconds: float, calls: int) -> int:
    """How often a graph goes through its calls so that its own launch does not count."""
    wanted = min(_MOST_CALLS, int(_GRAPH_SECONDS / max(call_seconds, 1e-7)) + 1)
    return max(1, wanted // calls)


def time_replays(
    clock: Callable[[Callable[[], None]], float],
    replay: Callable[[], None],
    seconds: float,
    calls: int,
    *,
    fewest: int = 5,
) -> Timing:
    """Time work of so many calls by `clock`; of a call the median, least and 95th percentile."""
    durations: list[float] = []
    while len(durations) < fewest or (
        sum(durations) < seconds and len(durations) < _MOST_REPLAYS
    ):
        durations.append(clock(replay))
    taken = np.asarray(durations) / calls
    return Timing(
        calls * len(durations),
        float(np.median(taken)),
        float(taken.min()),
        float(np.percentile(taken, 95)),
    )


def summarize(
    timing: Timing, work: Work, copy_bytes_per_s: float | None = None
) -> dict[str, object]:
    """Microseconds and rates; the share of the copy bandwidth where that is known."""
    bytes_per_s = work.num_bytes / timing.median
    return {
        **timing.microseconds(),
        "bytes": work.num_bytes,
        "flops": work.num_flops,
        "gb_per_s": bytes_per_s / 1e9,
        "tflop_per_s": work.num_flops / timing.median / 1e12,
        "copy_share": bytes_per_s / copy_bytes_per_s if copy_bytes_per_s else None,
    }


def copy_bandwidth(target: Target, num_bytes: int, seconds: float) -> tuple[Timing, float]:
    """Time of a copy on the device, and bytes read and written a second."""
    empty = target.device.empty
    source, to = (empty((num_bytes,), "uint8") for _ in range(2))
    # Pages are written before they are timed; what lies in them does not matter.
    target.copy(source, to)
    timing = time_device(target, [lambda: target.copy(to, source)], seconds)
    return timing, 2 * num_bytes / timing.median


def _in_turn(calls: Sequence[Callable[[], object]], rounds: int) -> Callable[[], None]:
    def launches() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return launches
