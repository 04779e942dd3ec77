"""A recorded forward pass, repeated for other batches, does what calling op by op does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rawpaged.backend import AttentionPlan, BatchMeta
from rawpaged.engine.model_runner import ModelRunner
from tests.engine.helpers import tiny_engine

MAX_NUM_TOKENS = 400
BLOCK_SIZE = 16
NUM_BLOCKS = 512


@pytest.fixture(params=["llama", "qwen3"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    engine = tiny_engine(
        request.param,
        dtype="bfloat16",
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_model_len=512,
        num_threads=2,
    )
    yield engine.runner
    engine.close()


def batch(rng: np.random.Generator, new: list[int], table_width: int) -> BatchMeta:
    """Requests with so many new tokens after a few others; each has blocks of its own."""
    before = rng.integers(0, 5, len(new))
    positions = [np.arange(first, first + count) for first, count in zip(before, new, strict=True)]
    tables = np.zeros((len(new), table_width), np.int32)
    used = 0
    slots = []
    for row, each in enumerate(positions):
        count = -(-int(each[-1] + 1) // BLOCK_SIZE)
        tables[row, :count] = np.arange(used, used + count)
        used += count
        slots.append(tables[row, each // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + each % 16)
    total = sum(new)
    return BatchMeta(
        token_ids=rng.integers(0, 320, total).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots),
        query_start_loc=np.cumsum([0, *new]).astype(np.int32),
        seq_lens=np.array([each[-1] + 1 for each in positions], np.int32),
        block_tables=tables,
        logits_rows=np.array([total - 1], np.int32),
    )


def result(
    runner: ModelRunner, forward: Callable[[AttentionPlan], None], meta: BatchMeta
) -> list[Any]:
    """Logits and the pool, after a step over a pool of ones."""
    for cache in runner.kv_caches:
        cache.keys[:] = 0x3F80
        cache.values[:] = 0x3F80
    config = runner.config
    plan = runner.backend.plan(
        meta, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads
    )
    forward(plan)
    logits = runner.model.compute_logits(plan.logits_rows)
    pools = [pool.copy() for cache in runner.kv_caches for pool in (cache.keys, cache.values)]
    return [logits.copy(), *pools]


def test_as_op_by_op(runner: ModelRunner) -> None:
    """Larger batches, then smaller ones; from the fifth on, index arrays have to grow."""
    records = 0

    def forward(plan: AttentionPlan) -> None:
        nonlocal records
        records += 1
        runner.model.forward(plan, runner.kv_caches)

    repeated = runner.backend.prepare(forward, MAX_NUM_TOKENS)
    rng = np.random.default_rng(0)
    cases = [
        ([1], 4),
        ([300, 1, 7], 40),
        ([129], 20),
        ([1, 2, 1], 1),
        ([1] * 300, 3),
        ([5, 395], 300),
        ([1] * 100, 8),
        ([128], 9),
    ]
    for new, table_width in cases:
        meta = batch(rng, new, table_width)
        expected = result(runner, lambda plan: runner.model.forward(plan, runner.kv_caches), meta)
        found = result(runner, repeated, meta)
        for mine, own in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, own)
    assert records == 3


def test_a_pass_that_cannot_be_recorded_is_recorded_the_next_time(runner: ModelRunner) -> None:
    """So that a step which ran out of memory does not spoil those after it."""
    failures = [None, MemoryError("planted")]

    def forward(plan: AttentionPlan) -> None:
        failure = failures.pop() if failures else None
        if failure is not None:
            raise failure
        runner.model.forward(plan, runner.kv_caches)

    repeated = runner.backend.prepare(forward, MAX_NUM_TOKENS)
    meta = batch(np.random.default_rng(2), [40, 3], 4)
    with pytest.raises(MemoryError, match="planted"):
        result(runner, repeated, meta)
    expected = result(runner, lambda plan: runner.model.forward(plan, runner.kv_caches), meta)
    for mine, own in zip(result(runner, repeated, meta), expected, strict=True):
        np.testing.assert_array_equal(mine, own)


def test_a_runner_records_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine("llama", num_threads=1)
    runner = engine.runner
    calls = 0
    embed = runner.backend.embed

    def counted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        embed(*args)

    monkeypatch.setattr(runner.backend, "embed", counted)
    plan_of = runner.backend.plan
    rng = np.random.default_rng(1)
    for size in (3, 60, 17):
        meta = batch(rng, [size], 4)
        runner._forward(plan_of(meta, num_heads=4, num_kv_heads=2))
    assert calls == 1
    engine.close()
