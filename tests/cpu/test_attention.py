"""Attention in every kind of arithmetic, over partitions, tiles and splits."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import BatchMeta
from rawpaged.cpu.attention_op import AttentionOp
from rawpaged.cpu.attention_work import (
    FIRST,
    FIRST_PARTITION,
    HEAD,
    LAST,
    LAST_PARTITION,
    MAX_SLOTS,
    NUM_SLOTS,
    PARTITION,
    REQUEST,
    SLOT,
    split_work,
)
from rawpaged.cpu.backend import CpuBackend
from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.products import Arithmetic
from tests import reference
from tests.ops.cases import AttentionCase, make_meta, store_kv
from tests.ops.row_cases import Float32, normal, stored

CASES = (
    AttentionCase("partitions", ((1, 700), (40, 600), (3, 513)), num_heads=9, num_kv_heads=3),
    AttentionCase("ends of partitions", ((1, 256), (1, 257), (2, 512), (300, 300))),
    AttentionCase("odd ends", ((1, 17), (1, 255), (7, 271)), head_dim=16, block_size=32),
    AttentionCase("head size no multiple of 16", ((5, 300), (1, 33)), head_dim=100),
    AttentionCase("head size 80", ((5, 300), (1, 530)), head_dim=80, num_heads=5, num_kv_heads=1),
    AttentionCase("window over partitions", ((1, 700), (40, 600)), window=300),
    AttentionCase("window inside a partition", ((1, 700), (40, 600), (1, 3)), window=7),
    AttentionCase("block size 128", ((1, 700), (9, 129)), block_size=128),
    AttentionCase("many heads to one", ((2, 300),), num_heads=40, num_kv_heads=1, head_dim=32),
)


@pytest.fixture(params=get_args(Arithmetic))
def arithmetic(request: pytest.FixtureRequest) -> Arithmetic:
    if request.param == "bfloat16_dot" and not FEATURES.avx512_bf16:
        pytest.skip("this processor has no dot products of bfloat16")
    kind: Arithmetic = request.param
    return kind


def cache_type(arithmetic: Arithmetic) -> str:
    return "float32" if arithmetic == "float32" else "bfloat16"


def make_backend(arithmetic: Arithmetic, num_threads: int = 2) -> CpuBackend:
    backend = CpuBackend(dtype=cache_type(arithmetic), num_threads=num_threads)
    backend._cache_ops._attention = AttentionOp(backend._team, arithmetic)
    return backend


class Batch:
    """A case with its cache, poisoned where nothing was written."""

    def __init__(self, backend: CpuBackend, case: AttentionCase, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case = case
        self.meta, num_blocks = make_meta(case, rng)
        self.cache = backend.new_kv_cache(
            num_blocks, case.num_kv_heads, case.head_dim, case.block_size
        )
        for pool in (self.cache.keys, self.cache.values):
            pool[...] = 0x7FC0 if pool.dtype == np.uint16 else np.nan
        shape = (case.num_kv_heads, case.head_dim)
        self.history = [
            (normal(rng, kv, *shape), normal(rng, kv, *shape)) for _, kv in case.lengths
        ]
        for row, (keys, values) in enumerate(self.history):
            own = np.arange(len(keys))
            block = self.meta.block_tables[row, own // case.block_size].astype(np.int64)
            slots = block * case.block_size + own % case.block_size
            store_kv(backend, self.cache, keys, values, slots)
        # Of 8 bits, and a scale that is a power of two: only weights are rounded.
        q = normal(rng, len(self.meta.token_ids), case.num_heads, case.head_dim)
        self.q = stored(q, "bfloat16")

    def run(
        self, backend: CpuBackend, meta: BatchMeta | None = None, q: Float32 | None = None
    ) -> Float32:
        meta, q = meta or self.meta, self.q if q is None else q
        plan = backend.plan(
            meta, num_heads=self.case.num_heads, num_kv_heads=self.case.num_kv_heads
        )
        out = np.full_like(q, np.nan)
        backend.paged_attention(
            out, q, self.cache, plan, scale=0.125, sliding_window=self.case.window
        )
        return out

    def expected(self, dtype: str) -> npt.NDArray[np.float64]:
        rows = []
        for row, (queries, kv) in enumerate(self.case.lengths):
            begin = self.meta.query_start_loc[row]
            keys, values = (stored(part, dtype) for part in self.history[row])
            q = self.q[begin : begin + queries]
            rows.append(
                reference.attention(q, keys, values, kv - queries, 0.125, self.case.window)
            )
        return np.concatenate(rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(arithmetic: Arithmetic, case: AttentionCase) -> None:
    backend = make_backend(arithmetic)
    batch = Batch(backend, case)
    out, expected = batch.run(backend), batch.expected(cache_type(arithmetic))
    backend.close()
    if arithmetic != "bfloat16_dot":
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-5)
        return
    # Scaled queries and weights are rounded by 2**-9 at most; scores by as much of q * k.
    assert np.abs(out - expected).max() < 2.0**-6
    error = np.sqrt(((out - expected) ** 2).mean() / (expected**2).mean())
    assert error < 4e-3


@pytest.mark.parametrize("window", [None, 50, 400])
def test_bits_of_a_row_do_not_depend_on_the_batch(
    arithmetic: Arithmetic, window: int | None
) -> None:
    """Each token as a decode step, alone and with others, on threads that split it; in chunks."""
    case = AttentionCase(
        "prompts", ((600, 600), (530, 530)), num_heads=6, num_kv_heads=2, window=window
    )
    backend = make_backend(arithmetic)
    batch = Batch(backend, case)
    whole = batch.run(backend)
    meta = batch.meta
    for num_threads, tokens in ((1, [0, 255, 256, 599]), (2, [257, 511, 1129]), (5, [300, 599])):
        other = make_backend(arithmetic, num_threads)
        alone = [batch.run(other, decode_of(meta, [t]), batch.q[[t]])[0] for t in tokens]
        together = batch.run(other, decode_of(meta, tokens), batch.q[tokens])
        other.close()
        assert np.stack(alone).tobytes() == whole[tokens].tobytes()
        assert together.tobytes() == whole[tokens].tobytes()
    for begin, end in ((0, 7), (250, 283), (590, 600)):
        chunk = batch.run(backend, chunk_of(meta, begin, end), batch.q[begin:end])
        assert chunk.tobytes() == whole[begin:end].tobytes()
    backend.close()


def decode_of(meta: BatchMeta, tokens: list[int]) -> BatchMeta:
    """Those tokens of a batch, each as the newest one of a request of its own."""
    requests = np.searchsorted(meta.query_start_loc, tokens, side="right") - 1
    return BatchMeta(
        token_ids=meta.token_ids[tokens],
        positions=meta.positions[tokens],
        slot_mapping=meta.slot_mapping[tokens],
        query_start_loc=np.arange(len(tokens) + 1, dtype=np.int32),
        seq_lens=meta.positions[tokens] + 1,
        block_tables=meta.block_tables[requests],
        logits_rows=meta.logits_rows,
    )


def chunk_of(meta: BatchMeta, begin: int, end: int) -> BatchMeta:
    """Tokens [begin, end) of the first request."""
    return BatchMeta(
        token_ids=meta.token_ids[begin:end],
        positions=meta.positions[begin:end],
        slot_mapping=meta.slot_mapping[begin:end],
        query_start_loc=np.array([0, end - begin], np.int32),
        seq_lens=meta.positions[end - 1 : end] + 1,
        block_tables=meta.block_tables[:1],
        logits_rows=meta.logits_rows,
    )


def test_what_is_not_finite_stays_in_its_request(arithmetic: Arithmetic) -> None:
    case = AttentionCase("two", ((5, 300), (5, 300)))
    backend = make_backend(arithmetic)
    batch = Batch(backend, case)
    before = batch.run(backend)
    batch.q[2, 1, 3] = np.nan
    batch.q[4, 0, 0] = np.inf
    after = batch.run(backend)
    backend.close()
    touched = np.zeros((10, 4), bool)
    touched[2, 1] = touched[4, 0] = True
    assert np.isnan(after[touched]).all()
    assert after[~touched].tobytes() == before[~touched].tobytes()


# Work


def lengths_meta(lengths: list[tuple[int, int]]) -> BatchMeta:
    meta, _ = make_meta(AttentionCase("", tuple(lengths)), np.random.default_rng(0))
    return meta


@pytest.mark.parametrize("num_threads", [1, 2, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(1, 5000)],
        [(1, 5000), (1, 20), (1, 3000)],
        [(100, 4000), (1, 900)],
        [(1, 100)] * 40,
        [(1, 120_000)] * 3,
    ],
    ids=str,
)
def test_tasks_cover_every_key_of_every_query_once(
    lengths: list[tuple[int, int]], num_threads: int
) -> None:
    meta = lengths_meta(lengths)
    work = split_work(meta, 4, 2, num_threads)
    assert (len(work.tasks), len(work.merges)) == (work.num_tasks[0], work.num_merges[0])
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    slots: dict[int, tuple[int, int]] = {}
    for task in work.tasks.tolist():
        ends = meta.seq_lens[task[REQUEST]]
        assert task[LAST_PARTITION] * PARTITION < ends + PARTITION
        for row in range(task[FIRST], task[LAST]):
            span = (task[FIRST_PARTITION], task[LAST_PARTITION])
            seen.setdefault((row, task[HEAD]), []).append(span)
        if task[SLOT] >= 0:
            for i in range(task[LAST_PARTITION] - task[FIRST_PARTITION]):
                assert task[SLOT] + i not in slots
                slots[task[SLOT] + i] = (task[FIRST], task[HEAD])
    for row, position in enumerate(meta.positions.tolist()):
        for head in range(2):
            spans = sorted(seen[row, head])
            assert spans[0][0] == 0
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
            assert spans[-1][1] * PARTITION > position
    merged = [
        (slot, (row, head))
        for row, head, first, count in work.merges.tolist()
        for slot in range(first, first + count)
    ]
    assert sorted(merged) == sorted(slots.items())
    assert len(slots) <= MAX_SLOTS
    assert sum(work.merges[:, NUM_SLOTS]) == len(slots)
    if num_threads == 1:
        assert not slots


def test_a_long_query_alone_is_shared() -> None:
    work = split_work(lengths_meta([(1, 5000)]), 4, 2, 2)
    assert len(work.merges) == 2
    pieces = work.tasks[:, LAST_PARTITION] - work.tasks[:, FIRST_PARTITION]
    assert len(pieces) >= 8
    assert pieces.max() - pieces.min() <= 4


