"""kv_stats() of LLM and AsyncEngine, between the steps of a running engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rawpaged import LLM, AsyncEngine, KVStats, RequestOutputKind, SamplingParams
from rawpaged.errors import EngineClosedError
from tests.tiny import Records, engine_of, tiny_config


def test_llm() -> None:
    with LLM(tiny_config()) as llm:
        before = llm.kv_stats()
        assert before.num_free_blocks == before.num_blocks == 128
        prompt = list(range(40))
        for _ in range(2):
            llm.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        after = llm.kv_stats()
        assert after == engine_of(llm).scheduler.kv_stats()
    assert (after.num_used_blocks, after.num_cached_blocks, after.num_free_blocks) == (0, 2, 126)
    assert (after.prefix_cache_queries, after.prefix_cache_hits) == (80, 32)
    with pytest.raises(EngineClosedError):
        llm.kv_stats()


def test_async_engine_while_requests_run() -> None:
    """20 prompt tokens; then a token a step, of which the last sampled one has no slot yet."""
    seen: list[KVStats] = []

    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        async for _ in engine.generate(list(range(20)), params):
            seen.append(await engine.kv_stats())

    records = Records()
    with AsyncEngine(tiny_config(), stats_logger=records) as engine:
        asyncio.run(main(engine))
    running = [stats for stats in seen if stats.num_used_blocks]
    assert running
    for stats in running:
        assert 20 <= stats.num_used_slots < 50
        assert stats.num_used_blocks == stats.num_block_refs == -(-stats.num_used_slots // 16)
        assert stats.num_unfilled_slots == -stats.num_used_slots % 16
        assert stats.num_reserved_slots == 0
    assert seen == sorted(seen, key=lambda stats: stats.num_used_slots or 99)
    assert [limits.num_blocks for limits in records.limits] == [128]
    assert records.steps[-1].kv.num_used_blocks == 0


def test_from_many_threads() -> None:
    with LLM(tiny_config()) as llm, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(llm.kv_stats) for _ in range(20)]
        llm.generate([[i] * 30 for i in range(6)], SamplingParams(max_tokens=9), use_tqdm=False)
        for each in asked:
            assert each.result().num_blocks == 128
