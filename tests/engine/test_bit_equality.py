"""Promise 3: what a request computes does not depend on what else runs, bit for bit."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from rawpaged.request import Request, RequestGroup
from tests.engine.helpers import recorded_logits, request, run, samples, tiny_engine

CASES = (
    *product(("llama", "mistral_sw", "qwen3"), ("float32", "bfloat16"), (None,)),
    ("mistral_sw", "bfloat16", "fp8_e4m3"),
    ("llama", "float32", "int8"),
)
"""Model, type of weights and of a KV cache that has another."""


def requests(count: int) -> list[Request]:
    """Requests of many lengths, greedy and sampled ones, some sharing a prefix."""
    rng = random.Random(0)
    shared = [rng.randrange(320) for _ in range(40)]
    made = []
    for i in range(count):
        prompt = (shared if i % 3 == 0 else []) + [
            rng.randrange(320) for _ in range(rng.randint(1, 60))
        ]
        params: dict[str, Any] = (
            {} if i % 2 else {"temperature": 1.0, "seed": i, "top_p": 0.9, "frequency_penalty": 0.5}
        )
        made.append(request(str(i), prompt, max_tokens=10 + i % 7, **params))
    return made


def solo_logits(
    model: str, count: int, dtype: str, kv_cache_dtype: str | None
) -> dict[str, list[bytes]]:
    """Each request alone in an engine that computes whole prompts and caches nothing."""
    engine = tiny_engine(
        model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=False,
        max_num_batched_tokens=128,
    )
    for each in requests(count):
        run(engine, [each])
    logits = recorded_logits(engine)
    engine.close()
    return logits


@pytest.mark.parametrize(("model", "dtype", "kv_cache_dtype"), CASES)
@pytest.mark.parametrize(
    "engine_params",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 33, "num_threads": 2},
        {"max_num_batched_tokens": 64, "num_threads": 3},
        {"max_num_batched_tokens": 512, "num_threads": 2, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 64, "num_blocks": 10},
        {"max_num_batched_tokens": 64, "max_num_seqs": 5, "num_blocks": 12, "num_threads": 2},
    ],
    ids=str,
)
def test_batch_chunks_threads_hits_and_preemption(
    model: str, dtype: str, kv_cache_dtype: str | None, engine_params: dict[str, int]
) -> None:
    for count in (2, 7, 32):
        expected = solo_logits(model, count, dtype, kv_cache_dtype)
        engine = tiny_engine(
            model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            **{"num_blocks": 300, **engine_params},  # type: ignore[arg-type]
        )
        run(engine, requests(count))
        assert recorded_logits(engine) == expected
        if count == 32:
            assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in engine_params)
            caches = engine_params.get("enable_prefix_caching", True)
            assert (engine.scheduler.prefix_cache_hits > 0) == caches
        engine.close()


def many_samples() -> list[list[Request]]:
    """Groups of one to four samples, some of equal prompts, some of whose blocks fill in a fork."""
    rng = random.Random(1)
    shared = [rng.randrange(320) for _ in range(47)]
    groups = []
    for i in range(10):
        prompt = shared if i % 3 == 0 else [rng.randrange(320) for _ in range(rng.randint(1, 60))]
        groups.append(
            samples(
                str(i),
                1 + i % 4,
                prompt,
                max_tokens=6 + 5 * (i % 4),
                temperature=1.0,
                seed=i,
                frequency_penalty=0.5,
            )
        )
    return groups


@pytest.mark.parametrize(
    "engine_params",
    [
        {"num_blocks": 200},
        {"num_blocks": 200, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"num_blocks": 200, "max_num_seqs": 3},
        {"num_blocks": 10, "num_threads": 2},
        {"num_blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 20},
        {"num_blocks": 10, "num_host_blocks": 40},
        {"num_blocks": 14, "num_host_blocks": 6, "max_num_seqs": 6, "max_num_batched_tokens": 20},
        {"num_blocks": 12, "num_host_blocks": 20, "enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "fp8_e4m3")]
)
def test_samples_that_share_blocks(
    dtype: str, kv_cache_dtype: str | None, engine_params: dict[str, int]
) -> None:
    """Forks, copies, preemption, swapping: each sample computes the bits of a request alone."""
    types: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    solo = tiny_engine(
        **types,
        enable_prefix_caching=False,
        max_num_batched_tokens=128,
    )
    for each in [each for group in many_samples() for each in group]:
        each.group = RequestGroup((each,))
        run(solo, [each])
    expected = recorded_logits(solo)
    solo.close()
    engine = tiny_engine(**types, **engine_params)  # type: ignore[arg-type]
    run(engine, [each for group in many_samples() for each in group])
    assert recorded_logits(engine) == expected
    manager = engine.scheduler.kv_cache_manager
    assert manager.num_forks > 0
    assert manager.num_block_copies > 0
    stats = engine.scheduler.kv_stats()
    assert (stats.num_preemptions > 0) == (engine_params["num_blocks"] < 20)
    assert (stats.num_swapped_in_blocks > 0) == ("num_host_blocks" in engine_params)
    engine.close()


def test_a_prompt_seen_before_gives_the_same_bits() -> None:
    engine = tiny_engine()
    for _ in range(3):
        run(engine, [request("a", list(range(100)), max_tokens=20)])
    logits = recorded_logits(engine)["a"]
    assert engine.scheduler.prefix_cache_hits == 2 * 96
    assert logits[:20] == logits[20:40] == logits[40:]
    engine.close()


@pytest.mark.parametrize("threads", [2, 5])
def test_thread_counts(threads: int) -> None:
    prompt = [(7 * i) % 320 for i in range(120)]
    rows = []
    for num_threads in (1, threads):
        engine = tiny_engine(num_threads=num_threads, max_num_batched_tokens=128)
        run(engine, [request("a", prompt, max_tokens=30)])
        rows.append(recorded_logits(engine)["a"])
        engine.close()
    assert rows[0] == rows[1]
