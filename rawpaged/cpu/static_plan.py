"""Plans of decode steps whose arrays keep their addresses, so that recordings can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rawpaged.backend import AttentionPlan, BatchMeta, DecodeBatch
from rawpaged.cpu.attention_work import (
    MAX_SLOTS,
    MERGE_FIELDS,
    PARTITION,
    TASK_FIELDS,
    AttentionWork,
    most_tasks,
    split_work,
)
from rawpaged.cpu.vector_ir import LANES

MIN_BLOCK_SIZE = LANES
_NO_BLOCKS = (0,)


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
        if num_reqs > self._arrays.num_rows:
            # Plans that there are keep the arrays they have.
            self._arrays = self._allocate(2 * num_reqs)
        return DecodePlan(num_reqs, self._arrays, self._split)

    def _allocate(self, num_reqs: int) -> _Arrays:
        max_blocks = -(-self._max_model_len // MIN_BLOCK_SIZE)
        return _Arrays(num_reqs, max_blocks, most_tasks(num_reqs, self._num_kv_heads))


class _Arrays:
    """Room for plans of up to `num_rows` requests, and what of them has been written down.

    Most steps change a token, a position and a slot of each request and nothing else. A view of
    an array takes a number faster than the array does, and an array faster than one that is made.
    """

    def __init__(self, num_rows: int, max_blocks: int, max_tasks: int) -> None:
        self.num_rows = num_rows
        self.plan = AttentionPlan(
            token_ids=np.zeros(num_rows, np.int32),
            positions=np.zeros(num_rows, np.int32),
            slot_mapping=np.full(num_rows, -1, np.int64),
            query_start_loc=np.arange(num_rows + 1, dtype=np.int32),
            seq_lens=np.ones(num_rows, np.int32),
            block_tables=np.zeros((num_rows, max_blocks), np.int32),
            logits_rows=np.arange(num_rows, dtype=np.int32),
            num_tokens=num_rows,
            work=AttentionWork(
                tasks=np.zeros((max_tasks, TASK_FIELDS), np.int32),
                num_tasks=np.zeros(1, np.int64),
                merges=np.zeros((MAX_SLOTS, MERGE_FIELDS), np.int32),
                num_merges=np.zeros(1, np.int64),
            ),
        )
        self.token_ids = self.plan.token_ids.data
        self.positions = self.plan.positions.data
        self.slots = self.plan.slot_mapping.data
        self.seq_lens = self.plan.seq_lens.data
        self.tables: list[Sequence[int]] = [_NO_BLOCKS] * num_rows
        """Blocks that each row of block_tables begins with."""
        self.partitions: list[int] = []
        """Of each row's keys, as `work` splits them."""

    def first(self, num_reqs: int) -> AttentionPlan:
        """The plan of the first rows."""
        plan = self.plan
        return AttentionPlan(
            token_ids=plan.token_ids[:num_reqs],
            positions=plan.positions[:num_reqs],
            slot_mapping=plan.slot_mapping[:num_reqs],
            query_start_loc=plan.query_start_loc[: num_reqs + 1],
            seq_lens=plan.seq_lens[:num_reqs],
            block_tables=plan.block_tables[:num_reqs],
            logits_rows=plan.logits_rows[:num_reqs],
            num_tokens=num_reqs,
            work=plan.work,
        )


class DecodePlan:
    """A StaticPlan (rawpaged.backend) for up to `num_reqs` requests of one token.

    Rows without a request have token 0 at position 0, a slot that is not stored, and attend to
    the first slot of block 0, whatever is there.
    """

    def __init__(
        self, num_reqs: int, arrays: _Arrays, split: Callable[[BatchMeta], AttentionWork]
    ) -> None:
        self.plan = arrays.first(num_reqs)
        self._arrays = arrays
        self._split = split

    def fill(self, batch: DecodeBatch) -> bool:
        """Put a batch of at most as many requests with one token each in; always True."""
        n, num_rows = len(batch.token_ids), self.plan.num_tokens
        assert n <= num_rows, f"{n=} {num_rows=}"
        partitions = []
        rows = zip(batch.token_ids, batch.positions, batch.slots, batch.block_tables, strict=True)
        for row, (token_id, position, slot, table) in enumerate(rows):
            self._fill_row(row, token_id, position, slot, table)
            partitions.append(position // PARTITION + 1)
        for row in range(n, num_rows):
            self._fill_row(row, 0, 0, -1, _NO_BLOCKS)
            partitions.append(1)
        if partitions != self._arrays.partitions:
            # How tasks are cut depends on these alone, and in which order they are taken is
            # hardly worth a new plan: requests of a batch grow together.
            self._plan_work()
            self._arrays.partitions = partitions
        return True

    def _fill_row(
        self, row: int, token_id: int, position: int, slot: int, table: Sequence[int]
    ) -> None:
        arrays = self._arrays
        arrays.token_ids[row] = token_id
        arrays.positions[row] = position
        arrays.slots[row] = slot
        arrays.seq_lens[row] = position + 1
        if arrays.tables[row] is not table:
            arrays.plan.block_tables[row, : len(table)] = table
            arrays.tables[row] = table

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
