"""What a request computes on the simulated GPU, bit for bit, whatever else runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rawpaged.backend import BatchMeta
from rawpaged.engine.engine import Engine
from rawpaged.gpu.attention_work import split_work
from rawpaged.gpu.token_roles import split_roles
from rawpaged.request import Request
from tests.engine.helpers import recorded_logits, request, run, samples
from tests.gpu.test_engine import gpu_engine

# Roles, on the host


def batch(requests: list[tuple[int, int, int]]) -> BatchMeta:
    """(tokens in the step, tokens with them, of which the prompt's) of each request."""
    queries = np.array([each[0] for each in requests])
    num_tokens = int(queries.sum())
    tables = np.arange(len(requests) * 3, dtype=np.int32).reshape(-1, 3)
    return BatchMeta(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.zeros(num_tokens, np.int64),
        query_start_loc=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        seq_lens=np.array([each[1] for each in requests], np.int32),
        block_tables=tables,
        logits_rows=np.arange(len(requests), dtype=np.int32),
        num_prompt_tokens=np.array([each[2] for each in requests], np.int32),
    )


def parts_one_by_one(meta: BatchMeta) -> list[tuple[int, int, int, bool, tuple[int, ...]]]:
    """(first token, tokens, keys, prompt's or not, block table) of each part, as they are meant."""
    assert meta.num_prompt_tokens is not None
    found: list[tuple[int, int, int, bool, tuple[int, ...]]] = []
    for row in range(len(meta.seq_lens)):
        first, end = meta.query_start_loc[row : row + 2].tolist()
        table = tuple(meta.block_tables[row].tolist())
        position = int(meta.seq_lens[row]) - (end - first)
        prompt = int(meta.num_prompt_tokens[row])
        before = max(0, min(prompt - position, end - first))
        if before:
            found.append((first, before, position + before, True, table))
        for token in range(first + before, end):
            found.append((token, 1, position + token - first + 1, False, table))
    return found


@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.integers(0, 9), st.integers(1, 20)).map(
            lambda t: (t[0], t[0] + t[1], t[2])
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(deadline=None)
def test_parts_are_the_prompts_tokens_and_each_generated_one(
    requests: list[tuple[int, int, int]],
) -> None:
    meta = batch(requests)
    parts = split_roles(meta)
    starts = parts.query_start_loc
    assert starts.dtype == parts.seq_lens.dtype == parts.block_tables.dtype == np.int32
    found = [
        (
            int(starts[i]),
            int(starts[i + 1] - starts[i]),
            int(parts.seq_lens[i]),
            bool(parts.is_prompt[i]),
            tuple(parts.block_tables[i].tolist()),
        )
        for i in range(len(parts.seq_lens))
    ]
    assert found == parts_one_by_one(meta)


def test_a_part_of_one_token_goes_where_it_is_told() -> None:
    meta = batch([(1, 9, 9), (1, 9, 8), (3, 5, 4), (1, 1, 1)])
    parts = split_roles(meta)
    work = split_work(
        parts.query_start_loc,
        parts.seq_lens,
        group=2,
        tile_rows=64,
        partition_tokens=32,
        max_items=9,
        is_prefill=parts.is_prompt,
    )
    (decode,) = work.rounds
    # Part 1 is the second request; the third one's last token is part 3.
    assert decode.requests.tolist() == [1, 3]
    assert sorted(work.tiles[:, :3].tolist()) == [[0, 0, 2], [2, 0, 4], [4, 0, 2]]


# The engine, over simulated kernels


def engine_of(**options: Any) -> Engine:
    return gpu_engine("llama", "bfloat16", batch_invariant=True, **options)


def requests() -> list[Request]:
    """Prompts that share a prefix and others, greedy and sampled."""
    rng = random.Random(0)
    shared = [rng.randrange(320) for _ in range(28)]
    prompts = [[*shared, 5], [*shared, 6, 7, 8], shared, [rng.randrange(320) for _ in range(15)]]
    return [
        request(str(i), prompt, max_tokens=7, temperature=float(i % 2), seed=i)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, list[bytes]]:
    """Logits of each request alone, its prompt in one piece, nothing cached or captured."""
    request.getfixturevalue("cuda_wheels")
    request.getfixturevalue("numba_cuda")
    engine = engine_of(enable_prefix_caching=False)
    for each in requests():
        run(engine, [each])
    logits = recorded_logits(engine)
    engine.close()
    return logits


@pytest.mark.gpusim
@pytest.mark.parametrize(
    "options",
    [
        {"budget": 16},  # which leaves single tokens of prompts
        {"budget": 64, "enforce_eager": False},
        {"budget": 19, "num_blocks": 6},
    ],
    ids=str,
)
def test_batch_chunks_hits_graphs_and_preemption(
    alone: dict[str, list[bytes]], options: dict[str, Any]
) -> None:
    engine = engine_of(**options)
    run(engine, requests())
    assert recorded_logits(engine) == alone
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in options)
    # Once more, with prompts in the cache but for what is in no full block.
    run(engine, requests())
    again = {name: rows[len(alone[name]) :] for name, rows in recorded_logits(engine).items()}
    assert again == alone
    assert engine.scheduler.prefix_cache_hits > 0
    engine.close()


@pytest.mark.gpusim
@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
def test_samples_of_a_prompt_begin_with_its_bits() -> None:
    """A fork's first row is computed alone, its sibling's at the end of a chunk."""
    prompt = [(7 * i) % 320 for i in range(21)]
    engine = engine_of()
    run(engine, samples("a", 3, prompt, max_tokens=3, temperature=1.0))
    first = {rows[0] for rows in recorded_logits(engine).values()}
    assert len(first) == 1
    engine.close()


@pytest.mark.gpusim
@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
def test_generated_tokens_are_not_taken_for_a_prompts() -> None:
    """A prompt that goes on where another request's output ended computes it as a prompt."""
    prompt = [(7 * i) % 320 for i in range(20)]
    cached = engine_of()
    tokens = run(cached, [request("a", prompt, max_tokens=14)])["a"]
    fresh = engine_of()
    for engine in (cached, fresh):
        run(engine, [request("b", prompt + tokens, max_tokens=1)])
    assert recorded_logits(cached)["b"] == recorded_logits(fresh)["b"]
    assert cached.scheduler.prefix_cache_hits == 16  # the prompt's one full block
    cached.close()
    fresh.close()


@pytest.mark.gpusim
@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
def test_without_the_flag_a_single_token_of_a_prompt_rounds_otherwise() -> None:
    """What the flag is for; if this fails, the flag may go."""
    prompt = [(7 * i) % 320 for i in range(33)]
    rows = []
    for budget in (64, 32):
        engine = gpu_engine("llama", "bfloat16", budget=budget)
        run(engine, [request("a", prompt, max_tokens=1)])
        rows.append(recorded_logits(engine)["a"][0])
        engine.close()
    assert rows[0] != rows[1]
