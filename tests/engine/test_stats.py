"""What the engine counts adds up, under preemption too."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from rawpaged import AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.outputs import RequestOutput
from tests.tiny import Records, tiny_config, wait_until

NUM_REQUESTS = 30
ABORTED = (3, 17)


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of different lengths, half of them with a common prefix."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(32)]
    return [
        (
            (shared if i % 2 else []) + [rng.randrange(3, 320) for _ in range(rng.randint(1, 60))],
            SamplingParams(
                n=1 + i % 3,
                max_tokens=rng.randint(1, 50),
                seed=i,
                prompt_logprobs=1 if i % 5 == 0 else None,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        for i in range(NUM_REQUESTS)
    ]


async def serve(engine: AsyncEngine, index: int, prompt: list[int], params: Any) -> int:
    """Number of tokens received."""
    num_tokens = 0
    async for output in engine.generate(prompt, params, request_id=str(index)):
        num_tokens += count(output)
        if index in ABORTED:
            await engine.abort(str(index))
    return num_tokens


def count(output: RequestOutput) -> int:
    return sum(len(sample.token_ids) for sample in output.outputs)


@pytest.fixture(scope="module")
def ran() -> tuple[Records, int]:
    """Records of the workload in a pool of 12 blocks, and the tokens received."""
    records = Records()
    config = tiny_config(num_gpu_blocks_override=12, max_model_len=160, max_num_seqs=8)
    with AsyncEngine(config, stats_logger=records) as engine:

        async def main() -> int:
            jobs = [serve(engine, i, *each) for i, each in enumerate(workload())]
            return sum(await asyncio.gather(*jobs))

        received = asyncio.run(main())
        wait_until(lambda: records.is_idle, 1.0)
    return records, received


def total(records: Records, name: str) -> int:
    return sum(getattr(step, name) for step in records.steps)


def test_requests(ran: tuple[Records, int]) -> None:
    records, _ = ran
    expected = sum(params.n for _, params in workload())
    assert len(records.requests) == expected
    reasons = [stats.finish_reason for stats in records.requests]
    assert set(reasons) == {"length", "stop", "abort"}
    assert sum(stats.num_prompt_tokens for stats in records.requests) == sum(
        len(prompt) * params.n for prompt, params in workload()
    )


def test_generation_tokens(ran: tuple[Records, int]) -> None:
    """Steps, requests and clients have seen the same number, aborted requests included."""
    records, received = ran
    assert total(records, "num_generation_tokens") == received
    assert sum(stats.num_generation_tokens for stats in records.requests) == received
    latencies = len(records.first_tokens) + len(records.inter_token_latencies)
    assert latencies == received


def test_preemptions(ran: tuple[Records, int]) -> None:
    records, _ = ran
    assert records.steps[-1].kv.num_preemptions > 5
    preemptions = sum(stats.num_preemptions for stats in records.requests)
    assert preemptions == records.steps[-1].kv.num_preemptions


def test_prefix_cache(ran: tuple[Records, int]) -> None:
    """Requests that want prompt logprobs do not look; the others are looked up once each."""
    records, _ = ran
    hits = records.steps[-1].kv.prefix_cache_hits
    assert 0 < hits == sum(stats.num_cached_tokens for stats in records.requests)
    most = sum(len(p) * params.n for p, params in workload() if params.prompt_logprobs is None)
    assert hits < records.steps[-1].kv.prefix_cache_queries <= most


def test_prompt_tokens(ran: tuple[Records, int]) -> None:
    """Of one sample each prompt token is computed or found; its siblings may share it all."""
    records, _ = ran
    needed = sum(len(prompt) for prompt, _ in workload())
    found = records.steps[-1].kv.prefix_cache_hits
    assert total(records, "num_prompt_tokens") > needed - found
    every = sum(len(prompt) * params.n for prompt, params in workload())
    assert total(records, "num_prompt_tokens") < every


def test_gauges(ran: tuple[Records, int]) -> None:
    records, _ = ran
    assert max(step.num_running for step in records.steps) <= 8
    assert max(step.num_waiting for step in records.steps) > 8
    for step in records.steps:
        assert step.kv.num_blocks == 12
        assert 0 <= step.kv.num_used_blocks <= 12 - step.kv.num_cached_blocks
    assert records.is_idle
    assert records.steps[-1].kv.num_cached_blocks > 0


def test_times(ran: tuple[Records, int]) -> None:
    records, _ = ran
    for stats in records.requests:
        if stats.num_generation_tokens == 0:
            assert stats.time_to_first_token_seconds is None
            continue
        assert stats.queue_seconds is not None
        assert stats.time_to_first_token_seconds is not None
        assert 0 <= stats.queue_seconds <= stats.time_to_first_token_seconds <= stats.e2e_seconds
        if stats.num_generation_tokens == 1:
            assert stats.time_per_output_token_seconds is None
        else:
            assert stats.time_per_output_token_seconds is not None
            later = stats.time_per_output_token_seconds * (stats.num_generation_tokens - 1)
            assert stats.time_to_first_token_seconds + later <= stats.e2e_seconds + 1e-6


def test_an_undisturbed_request_is_counted_exactly() -> None:
    records = Records()
    with AsyncEngine(tiny_config(), stats_logger=records) as engine:

        async def main() -> None:
            for _ in range(2):
                await serve(engine, -1, list(range(40)), SamplingParams(max_tokens=5, seed=1))

        asyncio.run(main())
        wait_until(lambda: len(records.requests) == 2 and records.is_idle)
    first, second = records.requests
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (40, 0)
    assert (second.num_prompt_tokens, second.num_cached_tokens) == (40, 32)
    assert total(records, "num_prompt_tokens") == 40 + 8
    assert records.steps[-1].kv.prefix_cache_queries == 80
    assert records.steps[-1].kv.prefix_cache_hits == 32
    assert records.steps[-1].kv.num_cached_blocks == 2
