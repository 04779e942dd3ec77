"""What one step computes: the only thing the model runner learns from the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNKNOWN_TOKEN = -1
"""Stands for the token that the step before is still sampling for the same request."""


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    The step computes positions [start, start + len(token_ids)) of the request and, if `samples`,
    one new token from the last of them. Their KV is stored from position `first_stored` on.
    """

    request_id: str
    token_ids: tuple[int, ...]
    """The last one may be UNKNOWN_TOKEN."""
    start: int
    """num_computed_tokens before the step, or the last token's position if that has KV too."""
    block_table: tuple[int, ...]
    """Block i holds positions [i * block_size, (i + 1) * block_size); covers the whole step."""
    samples: bool
    first_stored: int = 0
    """What stands below has its KV in shared blocks and is computed for its logits alone."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, in batch order; empty when nothing can run."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[str, ...]
    """Requests that lost their blocks to make room."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(device block, host block) to copy before anything else."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host block, device block) to copy then."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, target) blocks to copy then, before anything is computed; no target is a source."""
    swapped: tuple[str, ...] = ()
    """Requests whose blocks are swapped out or in: without these copies their KV is lost."""
    num_reached_blocks: int = 0
    """Device blocks from this one on have never been used, nor are they in this step."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that cannot go on if the step fails, each once."""
        scheduled = (request.request_id for request in self.scheduled)
        return tuple(dict.fromkeys((*scheduled, *self.swapped)))

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.scheduled)
