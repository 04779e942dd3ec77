"""A forward pass that is recorded once and repeated for batches of any size.

Nothing of a recording but numbers of rows depends on how many tokens there are, as long as index
arrays keep their place. So a step costs copies of these, not a call of every op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import AttentionPlan
from rawpaged.cpu.attention_work import MAX_SLOTS, MERGE_FIELDS, TASK_FIELDS, AttentionWork
from rawpaged.cpu.threads import Recording, ThreadTeam

_LEAST_ROOM = 256
"""Requests, blocks of a request, and tasks of attention for which there is room at first."""


class RepeatedForward:
    """forward(plan) for plans of at most max_num_tokens; recorded when it is first called.

    It is recorded anew when a plan's arrays outgrow those that there are, which then double.
    """

    def __init__(
        self,
        team: ThreadTeam,
        forward: Callable[[AttentionPlan], None],
        max_num_tokens: int,
    ) -> None:
        self._team = team
        self._forward = forward
        self._max_num_tokens = max_num_tokens
        self._kept: AttentionPlan | None = None
        self._recording: Recording

    def __call__(self, plan: AttentionPlan) -> None:
        assert plan.num_tokens <= self._max_num_tokens, f"{plan.num_tokens=} are too many"
        if self._kept is None or not _fits(self._kept, plan):
            room = _room_for(plan, self._max_num_tokens)
            self._recording = self._team.record(
                lambda: self._forward(room), num_rows=self._max_num_tokens
            )
            self._kept = room
        for target, source in zip(_arrays(self._kept), _arrays(plan), strict=True):
            target[tuple(map(slice, source.shape))] = source
        self._recording.set_num_rows(plan.num_tokens)
        self._team.replay(self._recording)


def _arrays(plan: AttentionPlan) -> tuple[npt.NDArray[Any], ...]:
    work: AttentionWork = plan.work
    return (
        plan.token_ids,
        plan.positions,
        plan.slot_mapping,
        plan.query_start_loc,
        plan.seq_lens,
        plan.block_tables,
        work.tasks,
        work.num_tasks,
        work.merges,
        work.num_merges,
    )


def _fits(kept: AttentionPlan, plan: AttentionPlan) -> bool:
    return all(
        size <= room
        for target, source in zip(_arrays(kept), _arrays(plan), strict=True)
        for size, room in zip(source.shape, target.shape, strict=True)
    )


def _room_for(plan: AttentionPlan, num_tokens: int) -> AttentionPlan:
    """A plan of so many tokens, with arrays twice as large as needed and more; no logits_rows."""
    num_reqs, num_blocks, num_tasks = (
        max(_LEAST_ROOM, 2 * needed) for needed in (*plan.block_tables.shape, len(plan.work.tasks))
    )
    return AttentionPlan(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.zeros(num_tokens, np.int64),
        query_start_loc=np.zeros(num_reqs + 1, np.int32),
        seq_lens=np.zeros(num_reqs, np.int32),
        block_tables=np.zeros((num_reqs, num_blocks), np.int32),
        logits_rows=np.zeros(0, np.int32),
        num_tokens=num_tokens,
        work=AttentionWork(
            tasks=np.zeros((num_tasks, TASK_FIELDS), np.int32),
            num_tasks=np.zeros(1, np.int64),
            merges=np.zeros((MAX_SLOTS, MERGE_FIELDS), np.int32),
            num_merges=np.zeros(1, np.int64),
        ),
    )
