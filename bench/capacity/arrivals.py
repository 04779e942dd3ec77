"""When requests come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.capacity.lengths import RequestSize


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds from the start."""

    size: RequestSize
    seconds: float = 0.0


def all_at_once(sizes: Sequence[RequestSize]) -> list[Arrival]:
    """A queue that is never empty: what memory allows, whatever the rate."""
    return [Arrival(size) for size in sizes]


def poisson(sizes: Sequence[RequestSize], rate: float, seed: int) -> list[Arrival]:
    """Arrivals at `rate` a second; another rate stretches the same pattern."""
    rng = random.Random(f"arrivals {seed}")
    arrivals, now = [], 0.0
    for size in sizes:
        now += rng.expovariate(1.0)
        arrivals.append(Arrival(size, now / rate))
    return arrivals
