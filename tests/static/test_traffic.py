"""Memory traffic that kernels issue on the simulator, against the least that they could.

The least of global memory: each block reads once what it needs, and writes its results, in whole
sectors. What several blocks read counts for each, as it comes from the L2 cache at best. Of shared
memory: as many passes over the banks as accesses of these widths take without conflicts.
Addresses are those that threads use, so a number can only change with a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.gpu.gather import GatherRows
from rawpaged.gpu.kv_cache import StoreKV, cache_shape
from rawpaged.gpu.linear import Linear, pack
from rawpaged.gpu.linear_kernels import Epilogue, Mode
from rawpaged.gpu.norm import RmsNorm
from rawpaged.gpu.sampling import DeviceLogprobRows, DeviceSamplingRows, Sampling
from rawpaged.gpu.tuned import ANY_ROWS, FewRowsTile, GemmTile, LinearTile
from tests.gpu.attention_batch import Batch, Extras, make_attention, run
from tests.hostsim.loader import HostLoader
from tests.hostsim.wheels import CudaWheels
from tests.ops.cases import AttentionCase

pytestmark = pytest.mark.gpusim

Array = npt.NDArray[Any]
BF16: Any = ml_dtypes.bfloat16
SECTOR = 32


def zeros(*shape: int, dtype: Any = BF16) -> Array:
    return np.zeros(shape, dtype)


def decode(loader: HostLoader, cache_dtype: str) -> int:
    """One request in two partitions of 8 heads over 2 KV heads."""
    case = AttentionCase("", ((1, 512),), num_heads=8, num_kv_heads=2, head_dim=128, block_size=16)
    extras = Extras(cache_dtype=cache_dtype)
    attention, _ = make_attention(loader, case, extras, partition_tokens=256)
    run(attention, Batch(case, extras))
    cache = 2 * 512 * 2 * 128 * attention.cache_type.itemsize
    partials = 2 * 8 * (128 + 2) * 4
    queries = 2 * 8 * 128 * 2  # by each partition
    return cache + queries + partials


def prefill(loader: HostLoader) -> int:
    """One tile: 64 queries of 2 heads, which see 192 keys."""
    case = AttentionCase("", ((64, 192),), num_heads=2, num_kv_heads=1, head_dim=128)
    attention, _ = make_attention(loader, case)
    run(attention, Batch(case))
    return 2 * 192 * 128 * 2 + 2 * 64 * 2 * 128 * 2


def store(loader: HostLoader, cache_dtype: str) -> int:
    """Eight tokens of 4 heads into slots side by side."""
    op = StoreKV(
        loader,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        num_kv_heads=4,
        head_dim=128,
        block_size=16,
    )
    dtype: Any = BF16 if cache_dtype == "bfloat16" else op.cache_type.array_dtype
    keys, values = (zeros(*cache_shape(1, 4, 128, 16), dtype=dtype) for _ in range(2))
    scale = np.ones(4, np.float32) if op.cache_type.is_scaled else None
    qkv = zeros(8, 12, 128)
    slots = np.arange(8, dtype=np.int64)
    op(keys, values, qkv[:, 4:8], qkv[:, 8:], slots, key_scale=scale, value_scale=scale)
    return 2 * 8 * 4 * 128 * (2 + op.cache_type.itemsize) + slots.nbytes


def matmul(loader: HostLoader, tile: LinearTile, rows: int, out_features: int) -> int:
    """A product that is one tile."""
    depth = 512
    weight = pack(
        np.zeros((out_features, depth), np.float32), None, dtype="bfloat16", to_device=np.array
    )
    linear = Linear(
        loader,
        dtype="bfloat16",
        tiles={ANY_ROWS: tile},
        modes=[Mode(Epilogue.STORE, "bfloat16")],
        num_sms=1,
        workspace=np.zeros(1, np.float32),
    )
    linear(zeros(rows, out_features), zeros(rows, depth), weight)
    return 2 * depth * (rows + out_features) + 4 * out_features + 2 * rows * out_features


def norm(loader: HostLoader) -> int:
    """Rows of a block each, with the residual in float32 read and written."""
    out, x = zeros(4, 2048), zeros(4, 2048)
    residual, weight = zeros(4, 2048, dtype=np.float32), zeros(2048, dtype=np.float32)
    RmsNorm(loader, dtype="bfloat16", size=2048).add_rms_norm(out, x, residual, weight, 1e-5)
    return x.nbytes + out.nbytes + 2 * residual.nbytes + 4 * weight.nbytes


def head_norm(loader: HostLoader) -> int:
    """Heads of 128 in place, a warp each."""
    x, weight = zeros(4, 8, 128), zeros(128, dtype=np.float32)
    RmsNorm(loader, dtype="bfloat16", size=128).rms_norm(x, x, weight, 1e-5)
    return 2 * x.nbytes + 4 * 8 * weight.nbytes


def gather(loader: HostLoader) -> int:
    """Rows of 16-byte words."""
    x, out = zeros(8, 1024), zeros(4, 1024)
    GatherRows(loader)(out, x, np.array([7, 0, 3, 3], np.int32))
    return 2 * out.nbytes


def sample(loader: HostLoader) -> int:
    """A pass for the maximum, three each for top-k and top-p, 1 + 1/32 for the draw."""
    vocab = 8192
    logits = np.random.default_rng(0).standard_normal((2, vocab)).astype(np.float32)
    rows = DeviceSamplingRows(
        temperature=np.ones(2, np.float32),
        top_k=np.full(2, 50, np.int32),
        top_p=np.full(2, 0.9, np.float32),
        min_p=np.zeros(2, np.float32),
        seeds=np.zeros(2, np.uint64),
        positions=np.zeros(2, np.uint32),
        sample_indices=np.zeros(2, np.uint32),
    )
    Sampling(loader, vocab_size=vocab).sample(np.zeros(2, np.int32), logits, rows)
    return logits.nbytes * (8 * 32 + 1) // 32


def logprobs(loader: HostLoader) -> int:
    """Two passes, and four for the likeliest tokens."""
    vocab, k = 8192, 4
    logits = np.random.default_rng(1).standard_normal((2, vocab)).astype(np.float32)
    out = DeviceLogprobRows(
        chosen=np.zeros(2, np.float32),
        ranks=np.zeros(2, np.int32),
        top_token_ids=np.zeros((2, k), np.int32),
        top_logprobs=np.zeros((2, k), np.float32),
    )
    Sampling(loader, vocab_size=vocab).token_logprobs(out, logits, np.zeros(2, np.int32))
    return 6 * logits.nbytes


@dataclass(frozen=True, slots=True)
class Case:
    """A launch, and how much more than the least it may ask for."""

    kernel: str
    launch: Callable[[HostLoader], int]
    """Returns the least bytes of global memory."""
    global_factor: float
    shared_factor: float


# Above 1 is what is read in parts of a sector or again: queries by each warp of decode (in order
# of the cache's bytes, so worse for FP8), scales and indices; conflicts are left in few_rows' sums.
CASES = {
    "decode": Case("paged_decode", lambda loader: decode(loader, "bfloat16"), 1.1, 1.0),
    "decode-fp8": Case("paged_decode", lambda loader: decode(loader, "fp8_e4m3"), 1.25, 1.0),
    "prefill": Case("paged_prefill", prefill, 1.05, 1.0),
    "store": Case("store_kv", lambda loader: store(loader, "bfloat16"), 1.05, 1.0),
    "store-fp8": Case("store_kv", lambda loader: store(loader, "fp8_e4m3"), 1.1, 1.0),
    "gemm": Case(
        "gemm_", lambda loader: matmul(loader, GemmTile(64, 64, 64, 4, 2, 2), 64, 64), 1.05, 1.0
    ),
    "few-rows": Case(
        "few_rows", lambda loader: matmul(loader, FewRowsTile(8, 1, 3), 8, 16), 1.05, 1.1
    ),
    "norm": Case("add_rms_norm", norm, 1.0, 1.0),
    "head-norm": Case("rms_norm_in_place", head_norm, 1.0, 1.0),
    "gather": Case("gather_rows", gather, 1.05, 1.0),
    "sample": Case("sample", sample, 1.05, 1.05),
    "logprobs": Case("token_logprobs", logprobs, 1.05, 1.05),
}


@pytest.mark.parametrize("name", CASES)
def test_traffic_is_near_the_least(name: str, cuda_wheels: CudaWheels) -> None:
    case = CASES[name]
    loader = HostLoader(profile=True)
    least = case.launch(loader)
    (traffic,) = (
        counts
        for kernel, counts in loader.take_traffic().items()
        if kernel.startswith(case.kernel)
    )
    assert traffic.sectors * SECTOR <= case.global_factor * least, str(traffic)
    assert traffic.sectors * SECTOR >= least, f"{least=} is not the least\n{traffic}"
    assert traffic.wavefronts <= case.shared_factor * traffic.ideal_wavefronts, str(traffic)
