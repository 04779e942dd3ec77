"""kv_stats() of LLM and AsyncEngine, between the steps of a running engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rawpaged import LLM, AsyncEngine, KVStats, SamplingParams
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


class AskingAtEachToken(Records):
    """Holds the engine at each token until its event loop has asked for the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[asyncio.Task[KVStats]] = []

    def start(self, engine: AsyncEngine) -> None:
        """To be called on the loop that asks."""
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def record_first_token(self, seconds: float) -> None:
        self.record_inter_token_latency(seconds)

    def record_inter_token_latency(self, seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(timeout=60)

    async def _ask(self) -> None:
        self.asked.append(asyncio.create_task(self._engine.kv_stats()))
        await asyncio.sleep(0)


def test_async_engine_while_requests_run() -> None:
    """20 prompt tokens; then a token a step, of which the last sampled one has no slot yet."""
    records = AskingAtEachToken()

    async def main(engine: AsyncEngine) -> list[KVStats]:
        records.start(engine)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        async for _ in engine.generate(list(range(20)), params):
            pass
        return await asyncio.gather(*records.asked)

    with AsyncEngine(tiny_config(), stats_logger=records) as engine:
        seen = asyncio.run(main(engine))
    assert [stats.num_used_slots for stats in seen] == [*range(20, 49), 0]
    for stats in seen:
        assert stats.num_used_blocks == stats.num_block_refs == -(-stats.num_used_slots // 16)
        assert stats.num_unfilled_slots == -stats.num_used_slots % 16
        assert stats.num_reserved_slots == 0
    assert [limits.num_blocks for limits in records.limits] == [128]
    assert records.steps[-1].kv.num_used_blocks == 0


def test_from_many_threads() -> None:
    with LLM(tiny_config()) as llm, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(llm.kv_stats) for _ in range(20)]
        llm.generate([[i] * 30 for i in range(6)], SamplingParams(max_tokens=9), use_tqdm=False)
        for each in asked:
            assert each.result().num_blocks == 128
