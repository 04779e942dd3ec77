"""A plan that is filled again and again, whatever it held before, is the one of its batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rawpaged.backend import AttentionPlan, DecodeBatch
from rawpaged.cpu.attention_work import PARTITION
from rawpaged.cpu.static_plan import DecodePlans

MAX_MODEL_LEN = 20 * PARTITION
TABLES = [tuple(range(10 * i, 10 * i + 3 + i % 2)) for i in range(6)]


def decode_plans(num_threads: int) -> DecodePlans:
    return DecodePlans(
        num_heads=4, num_kv_heads=2, max_model_len=MAX_MODEL_LEN, num_threads=num_threads
    )


@st.composite
def decode_batches(draw: st.DrawFn) -> DecodeBatch:
    """Few tables and lengths, so that rows often are what they were."""
    n = draw(st.integers(1, 5))
    lengths = st.sampled_from([1, 2, PARTITION, PARTITION + 1, 7 * PARTITION, MAX_MODEL_LEN])
    seq_lens = draw(st.lists(lengths, min_size=n, max_size=n))
    return DecodeBatch(
        token_ids=draw(st.lists(st.integers(0, 319), min_size=n, max_size=n)),
        positions=[length - 1 for length in seq_lens],
        slots=draw(st.lists(st.integers(-1, 500), min_size=n, max_size=n)),
        block_tables=draw(st.lists(st.sampled_from(TABLES), min_size=n, max_size=n)),
    )


def check(plan: AttentionPlan, batch: DecodeBatch) -> None:
    """The arrays hold the batch, then rows that do nothing."""
    rest = plan.num_tokens - len(batch.token_ids)
    assert plan.token_ids.tolist() == [*batch.token_ids, *[0] * rest]
    assert plan.positions.tolist() == [*batch.positions, *[0] * rest]
    assert plan.slot_mapping.tolist() == [*batch.slots, *[-1] * rest]
    assert plan.seq_lens.tolist() == [position + 1 for position in plan.positions]
    assert plan.query_start_loc.tolist() == [*plan.logits_rows.tolist(), plan.num_tokens]
    for row, table in enumerate([*batch.block_tables, *[(0,)] * rest]):
        assert plan.block_tables[row, : len(table)].tolist() == list(table)


def partitions_of(plan: AttentionPlan) -> list[tuple[int, int, int]]:
    """(row, head, partition) of all that tasks read, and of those to be merged."""
    tasks = plan.work.tasks[: plan.work.num_tasks[0]].tolist()
    return sorted(
        (first, head, partition)
        for _, head, first, _, begin, end, _ in tasks
        for partition in range(begin, end)
    )


def merges_of(plan: AttentionPlan) -> list[tuple[int, int, int]]:
    """(row, head, number of slots)."""
    merges = plan.work.merges[: plan.work.num_merges[0]].tolist()
    return sorted((row, head, num_slots) for row, head, _, num_slots in merges)


@pytest.mark.parametrize("num_threads", [1, 3])
@given(st.lists(st.tuples(decode_batches(), st.integers(0, 2)), min_size=1, max_size=6))
@settings(deadline=None)
def test_filled_again(num_threads: int, batches: list[tuple[DecodeBatch, int]]) -> None:
    plans = decode_plans(num_threads)
    made = {size: plans(size) for size in (7, 1, 2, 3, 4, 5, 6)}
    for batch, num_spare in batches:
        plan = made[len(batch.token_ids) + num_spare]
        assert plan.fill(batch)
        check(plan.plan, batch)
        assert partitions_of(plan.plan) == [
            (row, head, partition)
            for row, seq_len in enumerate(plan.plan.seq_lens.tolist())
            for head in range(2)
            for partition in range(-(-seq_len // PARTITION))
        ]
        fresh = decode_plans(num_threads)(plan.plan.num_tokens)
        fresh.fill(batch)
        assert merges_of(plan.plan) == merges_of(fresh.plan)


def test_more_requests_than_there_was_room_for() -> None:
    plans = decode_plans(1)
    small, large = plans(1), plans(3)
    batch = DecodeBatch([5], [9], [9], [TABLES[0]])
    for plan in (small, large, small):
        plan.fill(batch)
        check(plan.plan, batch)
    assert not np.shares_memory(small.plan.token_ids, large.plan.token_ids)
