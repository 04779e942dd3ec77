"""Numbers taken while other work runs mean nothing: warn, or refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable

MOST_BUSY = 0.08
"""Share of all processors' time above which a machine does not count as idle."""


class BusyMachineError(Exception):
    """Other work runs, and the measurement was not to be taken then."""


def least_busy(measure: Callable[[], float | None], *, tries: int = 4) -> float | None:
    """The first share of `measure` that is not above MOST_BUSY, else the least of all.

    A server may have something to do for some seconds after its last request.
    """
    least: float | None = None
    for _ in range(tries):
        busy = measure()
        if busy is None or busy <= MOST_BUSY:
            return busy
        least = busy if least is None else min(least, busy)
    return least


def check_quiet(busy: float | None, *, require: bool) -> float | None:
    """Pass on the share measured just before; warns above MOST_BUSY, raises if `require`."""
    if busy is None or busy <= MOST_BUSY:
        return busy
    message = f"the machine is {busy:.0%} busy with other work"
    if require:
        raise BusyMachineError(f"{message}, and --require-quiet was given")
    print(f"warning: {message}; the row says so in load_before", file=sys.stderr)
    return busy
