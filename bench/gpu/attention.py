"""Times of paged attention at a model's shape, beside the copy bandwidth and torch's attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bench.attention_cases import BLOCK_SIZE, attention_flops, make_batch
from bench.gpu.peers import attention_seconds, import_torch
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target, fill
from bench.gpu.timing import Work, cold_copies, copy_bandwidth, summarize, time_device
from bench.replay_arrays import new_cache
from bench.roofline import Model, Step
from rawpaged.backend import LARGEST_ELEMENT
from rawpaged.gpu.backend import CudaBackend
from tests import reference
from tests.ops.kv_elements import dequantised, from_cpu, quantised, raw

_MEMORY_SHARE = 0.6
"""Of what is free, for the pool."""
_LONGEST_CHECKED = 4096
_TOLERANCE = 2.0**-7


class _Pool:
    """One layer's KV of random numbers, with block tables drawn from all of it."""

    def __init__(
        self, target: Target, backend: CudaBackend, model: Model, kv_heads: int, num_blocks: int
    ) -> None:
        self.target, self.backend = target, backend
        self.num_heads, self.kv_heads, self.head_dim = model.num_heads, kv_heads, model.head_dim
        self.num_blocks = num_blocks
        block_bytes = backend.kv_bytes_per_block(kv_heads, self.head_dim, BLOCK_SIZE)
        self.token_bytes = block_bytes // BLOCK_SIZE
        self.rng = np.random.default_rng(kv_heads)
        self.cache = new_cache(backend, num_blocks, kv_heads, self.head_dim, BLOCK_SIZE)
        kind, scale = backend.kv_cache_dtype, self._scale()
        drawn = self.rng.standard_normal((1 << 14, 1, 64), np.float32)
        values = raw(quantised(drawn, scale, kind), kind).reshape(-1)
        fill(target, self.cache.keys, values)
        # Other numbers than the keys.
        fill(target, self.cache.values, values[::-1])

    def _scale(self) -> npt.NDArray[np.float32]:
        """Of keys and values alike, and of every head; 1 where there is none."""
        scale = self.cache.key_scale
        return np.ones(1, np.float32) if scale is None else self.backend.download(scale)[:1]

    def tables(self, copies: int, step: Step) -> npt.NDArray[np.int32]:
        """Block tables [copies, batch, blocks]; no block is in two of them."""
        width = -(-step.context // BLOCK_SIZE)
        copies = max(1, min(copies, self.num_blocks // (step.batch * width)))
        order = self.rng.permutation(self.num_blocks)[: copies * step.batch * width]
        return order.astype(np.int32).reshape(copies, step.batch, width)

    def measure(self, step: Step, seconds: float, copy_bytes_per_s: float) -> Results:
        """Checks the last request, then times calls that go through different blocks."""
        kv_bytes = step.batch * step.context * self.token_bytes
        tables = self.tables(cold_copies(self.target, kv_bytes), step)
        heads = (self.num_heads, self.head_dim)
        queries = self.rng.standard_normal((step.rows, *heads)).astype(ml_dtypes.bfloat16)
        q = self.target.device.upload(queries)
        out = self.backend.empty(queries.shape, "bfloat16")
        plans = [
            self.backend.plan(
                make_batch(table, step.queries, step.context),
                num_heads=self.num_heads,
                num_kv_heads=self.kv_heads,
            )
            for table in tables
        ]
        calls = [
            partial(
                self.backend.paged_attention,
                out,
                q,
                self.cache,
                plan,
                scale=self.head_dim**-0.5,
                sliding_window=None,
            )
            for plan in plans
        ]
        calls[0]()
        refcheck = self._check(out, queries, tables[0], step)
        timing = time_device(self.target, calls, seconds)
        flops = step.batch * attention_flops(*heads, step.queries, step.context)
        work = Work(kv_bytes + 2 * q.nbytes, flops)
        known = None if self.target.is_simulated else copy_bytes_per_s
        results = summarize(timing, work, known)
        return {**results, "copies": len(tables), "refcheck": refcheck}

    def _check(
        self, out: Any, queries: npt.NDArray[Any], tables: npt.NDArray[np.int32], step: Step
    ) -> str:
        """Of the last request's last query; raises AssertionError."""
        if step.context > _LONGEST_CHECKED:
            return "left out"
        download = self.backend.download
        keys, values = (
            self._values(np.concatenate([download(pool[int(b)]) for b in tables[-1]], axis=1))
            .transpose(1, 0, 2)[: step.context]
            .astype(np.float64)
            for pool in (self.cache.keys, self.cache.values)
        )
        scale = self.head_dim**-0.5
        expected = reference.attention(
            queries[-1:], keys, values, step.context - 1, scale, None
        )
        error = abs(download(out[-1:]).astype(np.float64) - expected).max()
        assert error <= _TOLERANCE * abs(expected).max(), f"{error=} {abs(expected).max()=}"
        return "passed"

    def _values(self, elements: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What a pool's elements [heads, n, d] stand for."""
        kind = self.backend.kv_cache_dtype
        return dequantised(from_cpu(elements, kind), self._scale(), kind)


def time_decode(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Every batch at every length that fits, for each number of query heads a KV head."""
    bandwidth = _measured_bandwidth(target, recorder, sizes)
    backend = CudaBackend(target.device, dtype="bfloat16")
    steps = [Step(b, 1, c) for c in sizes.decode_contexts for b in sizes.decode_batches]
    for group in sizes.groups:
        _time_steps(target, recorder, sizes, backend, group, steps, bandwidth)
        backend.release_unused()  # the pool's memory, which is now free
    backend.close()


def time_decode_of_bytes(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Caches of bytes, which are half of what there is to read."""
    bandwidth = _measured_bandwidth(target, recorder, sizes)
    group = sizes.model.num_heads // sizes.model.num_kv_heads
    for kv_cache_dtype in LARGEST_ELEMENT:
        backend = CudaBackend(target.device, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
        _time_steps(target, recorder, sizes, backend, group, sizes.byte_steps, bandwidth)
        backend.close()


def _time_steps(
    target: Target,
    recorder: Recorder,
    sizes: Sizes,
    backend: CudaBackend,
    group: int,
    steps: Sequence[Step],
    bandwidth: float,
) -> None:
    model = sizes.model
    kv_heads = model.num_heads // group
    block_bytes = backend.kv_bytes_per_block(kv_heads, model.head_dim, BLOCK_SIZE)
    limit = int(_MEMORY_SHARE * backend.memory_info()[0]) // block_bytes
    blocks_of = {step: step.batch * -(-step.context // BLOCK_SIZE) for step in steps}
    most = max(count for count in blocks_of.values() if count <= limit)
    at_least = -(-4 * target.cache_bytes // block_bytes)
    pool = _Pool(target, backend, model, kv_heads, max(most, at_least))
    for step in steps:
        parameters = {
            **_parameters(step, model, kv_heads),
            "kv_cache_dtype": backend.kv_cache_dtype,
        }
        if blocks_of[step] > limit:
            recorder.skip(f"attention/{step.name}", f"KV of {kv_heads} heads does not fit")
            continue
        run = partial(pool.measure, step, sizes.seconds, bandwidth)
        recorder.measure(f"attention/{step.name}", parameters, run)


def time_prefill(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Whole prompts, beside torch's attention where that is installed, and a chunk of one."""
    model = sizes.model
    bandwidth = _measured_bandwidth(target, recorder, sizes)
    backend = CudaBackend(target.device, dtype="bfloat16")
    blocks = max(step.batch * -(-step.context // BLOCK_SIZE) for step in sizes.prefills)
    pool = _Pool(target, backend, model, model.num_kv_heads, blocks)
    torch = None if target.is_simulated else import_torch()
    for step in sizes.prefills:
        parameters = _parameters(step, model, model.num_kv_heads)
        run = partial(pool.measure, step, sizes.seconds, bandwidth)
        recorder.measure(f"attention/{_prefill_name(step)}", parameters, run)
        if torch is not None and step.queries == step.context:
            peer = partial(_torch_attention, torch, model, step, sizes.seconds)
            recorder.measure(f"attention/{_prefill_name(step)}/torch", parameters, peer)
    if torch is None:
        recorder.skip("attention/torch", "torch with CUDA is not installed")
    backend.close()


def _torch_attention(torch: Any, model: Model, step: Step, seconds: float) -> Results:
    timing = attention_seconds(torch, model, step.batch, step.queries, seconds)
    flops = step.batch * attention_flops(
        model.num_heads, model.head_dim, step.queries, step.context
    )
    return summarize(timing, Work(0, flops))


def _measured_bandwidth(target: Target, recorder: Recorder, sizes: Sizes) -> float:
    _, bytes_per_s = copy_bandwidth(target, sizes.copy_bytes, sizes.seconds)
    recorder.peaks["copy_gb_per_s"] = bytes_per_s / 1e9
    return bytes_per_s


def _prefill_name(step: Step) -> str:
    """Batch, new tokens and all tokens: Step's own name leaves the first and the last out."""
    return f"prefill {step.batch} x {step.queries} of {step.context}"


def _parameters(step: Step, model: Model, kv_heads: int) -> Mapping[str, object]:
    return {
        "batch": step.batch,
        "queries": step.queries,
        "context": step.context,
        "num_heads": model.num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": model.head_dim,
        "block_size": BLOCK_SIZE,
        "dtype": "bfloat16",
    }
