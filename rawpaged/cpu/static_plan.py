"""Plans of decode steps whose arrays keep their addresses, so that recordings can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from rawpaged.backend import AttentionPlan, BatchMeta
from rawpaged.cpu.attention_work import (
    MAX_SLOTS,
    MERGE_FIELDS,
    TASK_FIELDS,
    AttentionWork,
    most_tasks,
    split_work,
)
from rawpaged.cpu.vector_ir import LANES

MIN_BLOCK_SIZE = LANES


class DecodePlans:
    """Makes plans; those of all sizes share their arrays, since one is run at a time."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, max_model_len: int, num_threads: int
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._max_model_len = max_model_len
        self._split = partial(
            split_work, num_heads=num_heads, num_kv_heads=num_kv_heads, num_threads=num_threads
        )
        self._arrays = self._allocate(1)

    def __call__(self, num_reqs: int) -> DecodePlan:
        if num_reqs > self._arrays.num_tokens:
            # Plans that there are keep the arrays they have.
            self._arrays = self._allocate(2 * num_reqs)
        arrays = self._arrays
        plan = AttentionPlan(
            token_ids=arrays.token_ids[:num_reqs],
            positions=arrays.positions[:num_reqs],
            slot_mapping=arrays.slot_mapping[:num_reqs],
            query_start_loc=arrays.query_start_loc[: num_reqs + 1],
            seq_lens=arrays.seq_lens[:num_reqs],
            block_tables=arrays.block_tables[:num_reqs],
            logits_rows=arrays.logits_rows[:num_reqs],
            num_tokens=num_reqs,
            work=arrays.work,
        )
        return DecodePlan(plan, self._split)

    def _allocate(self, num_reqs: int) -> AttentionPlan:
        max_blocks = -(-self._max_model_len // MIN_BLOCK_SIZE)
        return AttentionPlan(
            token_ids=np.zeros(num_reqs, np.int32),
            positions=np.zeros(num_reqs, np.int32),
            slot_mapping=np.full(num_reqs, -1, np.int64),
            query_start_loc=np.arange(num_reqs + 1, dtype=np.int32),
            seq_lens=np.ones(num_reqs, np.int32),
            block_tables=np.zeros((num_reqs, max_blocks), np.int32),
            logits_rows=np.arange(num_reqs, dtype=np.int32),
            num_tokens=num_reqs,
            work=AttentionWork(
                tasks=np.zeros((most_tasks(num_reqs, self._num_kv_heads), TASK_FIELDS), np.int32),
                num_tasks=np.zeros(1, np.int64),
                merges=np.zeros((MAX_SLOTS, MERGE_FIELDS), np.int32),
                num_merges=np.zeros(1, np.int64),
            ),
        )


class DecodePlan:
    """A StaticPlan (rawpaged.backend) for up to `num_tokens` requests of one token.

    Rows without a request have token 0 at position 0, a slot that is not stored, and attend to
    the first slot of block 0, whatever is there.
    """

    def __init__(
        self, plan: AttentionPlan, split: Callable[[BatchMeta], AttentionWork]
    ) -> None:
        self.plan = plan
        self._split = split

    def fill(self, meta: BatchMeta) -> bool:
        """Put a batch of at most as many requests with one token each in; always True."""
        n, width = meta.block_tables.shape
        plan = self.plan
        assert n <= plan.num_tokens, f"{n=} {plan.num_tokens=}"
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
            getattr(plan, name)[:n] = getattr(meta, name)
        plan.block_tables[:n, :width] = meta.block_tables
        for name, nothing in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1)):
            getattr(plan, name)[n:] = nothing
        plan.seq_lens[n:] = 1
        plan.block_tables[n:] = 0
        self._plan_work()
        return True

    def _plan_work(self) -> None:
        """Write the tasks of all rows."""
        plan = self.plan
        meta = BatchMeta(
            plan.token_ids,
            plan.positions,
            plan.slot_mapping,
            plan.query_start_loc,
            plan.seq_lens,
            plan.block_tables,
            plan.logits_rows,
        )
        split, kept = self._split(meta), plan.work
        kept.tasks[: len(split.tasks)] = split.tasks
        kept.num_tasks[:] = split.num_tasks
        kept.merges[: len(split.merges)] = split.merges
        kept.num_merges[:] = split.num_merges
