"""Paged attention kernels on the simulator, against float64; see attention_batch.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawpaged.errors import BackendError
from rawpaged.gpu.attention import RaggedBatch
from rawpaged.gpu.attention_work import AttentionWork
from rawpaged.gpu.kv_cache import BLOCK_SIZES
from tests.gpu.attention_batch import (
    NO_BLOCK,
    Batch,
    Extras,
    Floats,
    bits,
    check_case,
    check_output,
    make_attention,
    run,
)
from tests.hostsim.conftest import ORDERS
from tests.hostsim.loader import HostLoader
from tests.ops.cases import ATTENTION_CASES, AttentionCase
from tests.ops.kv_elements import NUMPY_TYPES

pytestmark = pytest.mark.gpusim

SEEDS = (("random", 2), ("random", 3))
NO_WORK = AttentionWork((), None, 0)
MIXED = AttentionCase("mixed", ((20, 50), (1, 70), (1, 2), (2, 33), (1, 129)))


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_shared_cases(host_loader: HostLoader, case: AttentionCase) -> None:
    if case.head_dim == 100:
        with pytest.raises(BackendError, match="head_dim=100 is not one of"):
            make_attention(host_loader, case)
        return
    check_case(host_loader, case)


@pytest.mark.parametrize("host_loader", SEEDS, indirect=True)
def test_other_schedules(host_loader: HostLoader) -> None:
    check_case(host_loader, MIXED)
    check_case(host_loader, replace(MIXED, window=40))


@pytest.mark.parametrize("host_loader", ORDERS[-1:], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "head_dim"),
    [
        ("float16", "float16", 64),
        ("float16", "fp8_e4m3", 64),
        ("float16", "int8", 32),
        ("bfloat16", "fp8_e4m3", 80),
        ("bfloat16", "fp8_e4m3", 128),
        ("bfloat16", "int8", 96),
        ("bfloat16", "int8", 256),
    ],
)
def test_types(host_loader: HostLoader, dtype: str, cache_dtype: str, head_dim: int) -> None:
    case = replace(MIXED, head_dim=head_dim)
    check_case(host_loader, case, Extras(dtype, cache_dtype))
    windowed = Extras(dtype, cache_dtype, soft_cap=3.0, sinks=True)
    check_case(host_loader, replace(case, window=40, block_size=8), windowed)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(host_loader: HostLoader, block_size: int) -> None:
    check_case(host_loader, replace(MIXED, block_size=block_size))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24])
def test_groups(host_loader: HostLoader, group: int) -> None:
    lengths = ((1, 70), (5, 21), (1, 9))
    check_case(host_loader, AttentionCase("", lengths, num_heads=2 * group, num_kv_heads=2))


@pytest.mark.parametrize("partition_tokens", [16, 48, 128, 256])
def test_partitions_of_other_sizes(host_loader: HostLoader, partition_tokens: int) -> None:
    case = AttentionCase("", ((1, 300), (1, 129)), num_heads=10, num_kv_heads=1)
    batch = Batch(case)
    attention, _ = make_attention(host_loader, case, partition_tokens=partition_tokens)
    check_output(run(attention, batch), batch)


def test_large_group_of_large_heads(host_loader: HostLoader) -> None:
    case = AttentionCase("", ((1, 70), (3, 9)), num_heads=12, num_kv_heads=1, head_dim=256)
    check_case(host_loader, case)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_window_soft_cap_and_sinks(
    host_loader: HostLoader, window: int | None, soft_cap: float | None, sinks: bool
) -> None:
    check_case(host_loader, replace(MIXED, window=window), Extras(soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_large_scores(host_loader: HostLoader, soft_cap: float | None) -> None:
    batch = Batch(MIXED, Extras(soft_cap=soft_cap))
    batch.q *= np.array(40, batch.q.dtype)
    attention, _ = make_attention(host_loader, MIXED)
    check_output(run(attention, batch), batch)


def test_scores_far_below_zero(host_loader: HostLoader) -> None:
    batch = Batch(MIXED)
    batch.q[...] = 40 * np.abs(batch.q)
    batch.keys[...] = -np.abs(batch.keys)
    for row in batch.history:
        row[0] = -np.abs(row[0])
    attention, _ = make_attention(host_loader, MIXED)
    check_output(run(attention, batch), batch)


@pytest.mark.parametrize("window", [None, 40])
def test_decode_does_not_depend_on_the_batch(host_loader: HostLoader, window: int | None) -> None:
    case = replace(MIXED, window=window)
    batch = Batch(case, Extras(sinks=True))
    attention, _ = make_attention(host_loader, case)
    out = run(attention, batch)
    single = [row for row, count in enumerate(batch.counts) if count == 1]
    for row in single:
        alone = run(attention, batch.only([row]))
        assert bits(alone[0]) == bits(out[batch.query_start_loc[row]])
    reordered = run(attention, batch.only(single[::-1]))
    assert bits(reordered) == bits(out[batch.query_start_loc[single[::-1]]])


def test_rounds_that_share_a_small_workspace_give_the_same(host_loader: HostLoader) -> None:
    batch = Batch(MIXED)
    large, _ = make_attention(host_loader, MIXED)
    small, _ = make_attention(host_loader, MIXED, max_items=5)
    work = small.plan(batch.query_start_loc, batch.seq_lens)
    assert [part.num_items for part in work.rounds] == [4, 5]
    assert bits(run(small, batch)) == bits(run(large, batch))


def test_blocks_that_take_several_items_give_the_same(host_loader: HostLoader) -> None:
    batch = Batch(MIXED)
    many, _ = make_attention(host_loader, MIXED)
    two, _ = make_attention(host_loader, MIXED, grid_items=2)
    assert bits(run(two, batch)) == bits(run(many, batch))


@pytest.mark.parametrize("window", [None, 30])
def test_prefill_does_not_depend_on_the_chunks(host_loader: HostLoader, window: int | None) -> None:
    case = AttentionCase("", ((60, 100), (3, 20)), num_heads=6, window=window)
    batch = Batch(case)
    attention, _ = make_attention(host_loader, case)
    whole = run(attention, batch)
    for begin, end in ((0, 2), (2, 25), (25, 60)):
        chunk = batch.only([0])
        chunk.q = batch.q[begin:end]
        chunk.query_start_loc = np.array([0, end - begin], np.int32)
        chunk.seq_lens = np.array([40 + end], np.int32)
        assert bits(run(attention, chunk)) == bits(whole[begin:end])


def test_work_in_larger_arrays_as_a_captured_graph_replays_it(host_loader: HostLoader) -> None:
    case = replace(MIXED, lengths=((1, 70), (1, 2), (1, 129)))
    batch = Batch(case)
    attention, _ = make_attention(host_loader, case)
    expected = run(attention, batch)
    work = attention.plan(batch.query_start_loc, batch.seq_lens)
    (part,) = work.rounds

    def padded(array: Floats) -> Floats:
        large = np.full((30, *array.shape[1:]), NO_BLOCK, np.int32)
        large[: len(array)] = array
        return large

    larger = replace(
        part,
        items=padded(part.items),
        requests=padded(part.requests),
        first_items=padded(part.first_items),
        num_items=30,
        num_requests=30,
    )
    assert bits(run(attention, batch, replace(work, rounds=(larger,)))) == bits(expected)


def test_only_partitions_that_are_read_are_written(host_loader: HostLoader) -> None:
    case = AttentionCase("", ((1, 100), (1, 20)), window=40)
    attention, workspace = make_attention(host_loader, case)
    run(attention, Batch(case))
    # Keys 60 to 99 lie in partitions 1 to 3 of 0 to 3; the second request needs none at all.
    written = [True] * 3
    expected = [False, *written] + [False] * (attention.max_items - 4)
    for array in (workspace.top, workspace.sum, workspace.out[..., 0], workspace.out[..., -1]):
        assert (~np.isnan(array)).all(axis=1).tolist() == expected


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3"])
def test_long_contexts(cuda_wheels: object, cache_dtype: str) -> None:
    lengths = ((1, 1500), (1, 256), (150, 400), (1, 257))
    case = AttentionCase("", lengths, num_heads=8, num_kv_heads=2, head_dim=128)
    extras = Extras(cache_dtype=cache_dtype)
    attention, _ = make_attention(HostLoader("plain"), case, extras, partition_tokens=256)
    batch = Batch(case, extras)
    check_output(run(attention, batch), batch)


def test_what_the_kernels_do_not_take_is_refused(host_loader: HostLoader) -> None:
    with pytest.raises(BackendError, match="block_size=12"):
        make_attention(host_loader, replace(MIXED, block_size=12))
    with pytest.raises(BackendError, match="num_heads=5 is not a multiple of num_kv_heads=2"):
        make_attention(host_loader, replace(MIXED, num_heads=5))
    with pytest.raises(BackendError, match="partition_tokens=24"):
        make_attention(host_loader, MIXED, partition_tokens=24)
    with pytest.raises(BackendError, match="cache_dtype='int4'"):
        make_attention(host_loader, MIXED, Extras(cache_dtype="int4"))
    with pytest.raises(ValueError, match=r"top: float32\[0, 4\]"):
        make_attention(host_loader, MIXED, max_items=0)


INT64_LENS = RaggedBatch(
    np.zeros(2, np.int32), np.zeros(1, np.int64), np.zeros((1, 1), np.int32), NO_WORK
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks: float32\[3\]"),
        ({"key_scale": np.ones(2, np.float32)}, "has no scales"),
        ({"out": np.zeros((1, 4, 64), np.float32)}, r"out: float32\[1, 4, 64\]"),
        ({"keys": np.zeros((3, 2, 16, 65), np.float16)}, "arrays do not fit"),
        ({"q": np.zeros((1, 4 * 64 + 4), NUMPY_TYPES["bfloat16"])[:, 4:].reshape(1, 4, 64)}, "q:"),
        ({"plan": INT64_LENS}, r"seq_lens: int64\[1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    host_loader: HostLoader, change: dict[str, Any], message: str
) -> None:
    case = AttentionCase("", ((1, 9),))
    batch = Batch(case)
    attention, _ = make_attention(host_loader, case)
    work = attention.plan(batch.query_start_loc, batch.seq_lens)
    plan = RaggedBatch(batch.query_start_loc, batch.seq_lens, batch.block_tables, work)
    arguments: dict[str, Any] = {
        "out": np.empty_like(batch.q),
        "q": batch.q,
        "keys": batch.keys,
        "values": batch.values,
        "plan": plan,
        "scale": 0.125,
        "sliding_window": None,
    }
    with pytest.raises(ValueError, match=message):
        attention(**(arguments | change))


@pytest.mark.parametrize(
    ("cache_dtype", "window", "visible"), [("bfloat16", None, 700), ("fp8_e4m3", 100, 200)]
)
def test_decode_reads_each_visible_key_once_in_whole_sectors(
    cuda_wheels: object, cache_dtype: str, window: int | None, visible: int
) -> None:
    lengths = ((1, 500), (1, 200))
    case = AttentionCase(
        "", lengths, num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, window=window
    )
    extras = Extras(cache_dtype=cache_dtype)
    loader = HostLoader(profile=True)
    attention, _ = make_attention(loader, case, extras, partition_tokens=256)
    run(attention, Batch(case, extras))
    traffic = next(
        counts for name, counts in loader.take_traffic().items() if name.startswith("paged_decode")
    )
    least = visible * 2 * 128 * attention.cache_type.itemsize
    for array in ("keys", "values"):
        assert traffic.array_bytes(array) == least
        lines = [line for line in traffic.lines if line.array == array and line.cost > 1000]
        assert sum(line.cost for line in lines) == least // 32
    assert traffic.wavefronts == traffic.ideal_wavefronts


def test_prefill_reads_keys_once_a_tile_and_meets_no_bank_conflicts(cuda_wheels: object) -> None:
    # 64 queries of 2 heads are a tile of 128 rows, which sees 164 and reads no others.
    case = AttentionCase("", ((64, 164),), num_heads=4, num_kv_heads=2, head_dim=128)
    loader = HostLoader(profile=True)
    attention, _ = make_attention(loader, case)
    run(attention, Batch(case))
    (traffic,) = loader.take_traffic().values()
    for array in ("keys", "values"):
        assert traffic.array_bytes(array) == 164 * 2 * 128 * 2
    assert traffic.array_bytes("out", write=True) == 64 * 4 * 128 * 2
    assert traffic.sectors == traffic.ideal_sectors
    assert traffic.wavefronts == traffic.ideal_wavefronts
