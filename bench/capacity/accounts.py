"""What every slot of a KV memory is good for, summed over time.

In the words of the PagedAttention paper (section 3.1), for a request that holds `tokens` tokens,
will hold `final`, and was granted `slots` of which `taken` are gone from the pool:

    [0, tokens) | [tokens, min(final, slots)) | [min(final, slots), slots) | [slots, taken)
    token state | reservation                 | internal fragmentation     | external: rounding

What nobody has is external fragmentation while requests wait, and idle while none does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from bench.capacity.allocators import Grant


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Shares of the whole memory, over time; they sum to 1."""

    token_states: float
    reservation: float
    """Slots that their request will fill later."""
    internal: float
    """Slots that their request has and will never fill."""
    rounding: float
    """External: taken beyond what was asked for, by an allocator that rounds up."""
    unusable: float
    """External: free, though a request waits that does not fit."""
    idle: float
    """Free, and nobody waits."""

    @property
    def external(self) -> float:
        return self.rounding + self.unusable

    @property
    def of_taken(self) -> float:
        """Share of token states in what requests have, not in the whole memory."""
        taken = self.token_states + self.reservation + self.internal + self.rounding
        return self.token_states / taken if taken else 0.0


def leap_seconds(num_steps: int, first: float, more: float) -> float:
    """The sum of that many steps of `first`, `first + more`, `first + 2 * more`, ... seconds."""
    return num_steps * first + num_steps * (num_steps - 1) / 2 * more


class Accounts:
    """Sums for the step under way, and their integrals over time."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.num_live = 0
        """Requests that gain a token in each step."""
        self.tokens = 0
        self.seconds = 0.0
        self._usable = 0.0
        self._granted = 0.0
        self._taken = 0.0
        self._areas = dict.fromkeys((field.name for field in fields(MemoryShares)), 0.0)
        self._live_area = 0.0

    def add(self, final: int, grant: Grant, tokens: int) -> None:
        """A request starts."""
        self.num_live += 1
        self.tokens += tokens
        self._change(final, grant, 1)

    def replace(self, final: int, old: Grant, new: Grant) -> None:
        """A request got more."""
        self._change(final, old, -1)
        self._change(final, new, 1)

    def stop(self, final: int, grant: Grant, tokens: int) -> None:
        """A request's tokens are worth nothing any more, though it keeps its memory."""
        self.num_live -= 1
        self.tokens -= tokens
        self._usable -= min(final, grant.slots)

    def take_back(self, grant: Grant) -> None:
        """The memory of a request that has stopped."""
        self._granted -= grant.slots
        self._taken -= grant.taken

    def book(self, num_steps: int, first: float, more: float, *, is_waited_for: bool) -> None:
        """Adds steps of `first`, `first + more`, ... seconds to the integrals.

        In each of them every live request holds one token more than in the one before.
        """
        n, live = num_steps, self.num_live
        ones, squares = n * (n - 1) / 2, (n - 1) * n * (2 * n - 1) / 6
        seconds = leap_seconds(n, first, more)
        # The sum over i of (tokens + live * i) * (first + more * i)
        tokens = n * self.tokens * first + ones * (self.tokens * more + live * first)
        tokens += squares * live * more
        areas = self._areas
        areas["token_states"] += tokens
        areas["reservation"] += self._usable * seconds - tokens
        areas["internal"] += (self._granted - self._usable) * seconds
        areas["rounding"] += (self._taken - self._granted) * seconds
        free = "unusable" if is_waited_for else "idle"
        areas[free] += (self.capacity - self._taken) * seconds
        self._live_area += live * seconds
        self.seconds += seconds

    def shares(self) -> MemoryShares:
        """Of the time that was booked; all 0 if none was."""
        whole = self.capacity * self.seconds
        return MemoryShares(
            **{name: area / whole if whole else 0.0 for name, area in self._areas.items()}
        )

    def mean_live(self) -> float:
        """Requests that ran, on average."""
        return self._live_area / self.seconds if self.seconds else 0.0

    def forget(self) -> None:
        """Starts the integrals anew; what requests hold stays."""
        self.seconds = self._live_area = 0.0
        self._areas = dict.fromkeys(self._areas, 0.0)

    def _change(self, final: int, grant: Grant, sign: int) -> None:
        self._usable += sign * min(final, grant.slots)
        self._granted += sign * grant.slots
        self._taken += sign * grant.taken
