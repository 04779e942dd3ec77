"""A GPU as a backend: the ops of rawpaged.backend over launchers and a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rawpaged.backend import (
    AttentionPlan,
    BatchMeta,
    KVCache,
    KVScales,
    LinearWeight,
    LogitEdits,
    QuantizedRows,
    SamplingRows,
    StaticPlans,
    TokenLogprobRows,
    check_block_pairs,
)
from rawpaged.errors import BackendError
from rawpaged.gpu.activation import SiluAndMul
from rawpaged.gpu.block_copy import CopyBlocks
from rawpaged.gpu.cache_ops import CacheOps
from rawpaged.gpu.device import Device
from rawpaged.gpu.embedding import Embedding
from rawpaged.gpu.gather import GatherRows
from rawpaged.gpu.linear import Linear, PackedLinear, as_packed, workspace_size
from rawpaged.gpu.linear_kernels import Epilogue, Mode
from rawpaged.gpu.logit_edits import EditLogits
from rawpaged.gpu.norm import RmsNorm
from rawpaged.gpu.packing import Layout, ReusedMemory, upload_together
from rawpaged.gpu.run_ahead import SampleAhead, TakeTokenIds, add_logprobs
from rawpaged.gpu.sampling import DeviceLogprobRows, DeviceSamplingRows, Sampling
from rawpaged.gpu.static_plan import DecodePlan
from rawpaged.gpu.token_roles import split_roles
from rawpaged.gpu.tuned import linear_tiles
from rawpaged.tracing import RangeSink

_INDEX_ARRAYS = (
    *("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables"),
    "logits_rows",
)
"""Of a batch and of a plan: what goes to the device."""


class CudaBackend:
    """Ops over arrays of one device (see rawpaged.backend.Backend).

    dtype is "bfloat16" or "float16". Launchers are made when an op first meets a shape: kernels
    are compiled then, which `engine/warm_up.py` brings about before the first request.
    """

    name = "cuda"
    captures_on_demand = False
    block_bits: ClassVar[Mapping[str, float]] = {}

    def __init__(
        self, device: Device, *, dtype: str, kv_cache_dtype: str | None = None
    ) -> None:
        """kv_cache_dtype is "fp8_e4m3", "int8", or None for that of the weights."""
        self.kv_cache_dtype = kv_cache_dtype or dtype
        self._cache_ops = CacheOps(device, dtype=dtype, cache_dtype=self.kv_cache_dtype)
        self.dtype = dtype
        self.activation_dtype = dtype
        self.device = device
        self._norms: dict[int, RmsNorm] = {}
        self._samplings: dict[int, Sampling] = {}
        self._linear = self._make_linear()
        loader = device.loader
        self._gather = GatherRows(loader)
        self._embedding = Embedding(device)
        self._silu_and_mul = SiluAndMul(device)
        self._edit_logits = EditLogits(device)
        self._copy_blocks = CopyBlocks(device)
        self._take_token_ids = TakeTokenIds(device)
        self._sampling_inputs = ReusedMemory(device)
        self._sampling_outputs = ReusedMemory(device)
        self._copied_pairs = ReusedMemory(device)

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.device.empty(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        if array.dtype.kind in "iu":
            return self.device.upload(array)
        return self.device.upload(array, "float32")

    def download(self, array: Any) -> npt.NDArray[Any]:
        return self.device.download(array)

    def pack_linear(
        self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None
    ) -> PackedLinear:
        if weight.shape[1] % 8:
            raise BackendError(f"in_features={weight.shape[1]} is not a multiple of 8")
        upload = self.device.upload
        full_bias = np.zeros(len(weight), np.float32) if bias is None else bias
        return as_packed(
            upload(weight, self.dtype),
            upload(full_bias, "float32"),
            in_features=weight.shape[1],
        )

    def pack_quantized(
        self,
        parts: Sequence[npt.NDArray[Any] | QuantizedRows],
        bias: npt.NDArray[Any] | None,
    ) -> PackedLinear:
        raise BackendError("a GPU's weights are dequantised: there are no kernels for blocks")

    def linear_input(
        self, rows: int, weights: Sequence[LinearWeight], *, piece: int | None = None
    ) -> Any:
        return self.empty((rows, weights[0].in_features), self.activation_dtype)

    def offload_linear(self, weight: LinearWeight) -> LinearWeight:
        packed, download = _packed(weight), self.device.download
        return replace(packed, weight=download(packed.weight), bias=download(packed.bias))

    def restore_linear(self, weight: LinearWeight) -> LinearWeight:
        packed, upload = _packed(weight), self.device.upload
        return as_packed(
            upload(packed.weight), upload(packed.bias), in_features=packed.in_features
        )

    def kv_bytes_per_block(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        return self._cache_ops.bytes_per_block(num_kv_heads, head_dim, block_size)

    def new_kv_cache(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None = None,
    ) -> KVCache:
        shape = (num_blocks, num_kv_heads, head_dim, block_size)
        return self._cache_ops.new_kv_cache(*shape, scales)

    def new_host_kv_cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> KVCache:
        return self._cache_ops.new_host_kv_cache(num_blocks, num_kv_heads, head_dim, block_size)

    def kv_magnitudes(self, cache: KVCache, num_tokens: int) -> npt.NDArray[np.float32]:
        return self._cache_ops.kv_magnitudes(cache, num_tokens)

    def memory_info(self) -> tuple[int, int]:
        return self.device.memory_info()

    def release_unused(self) -> None:
        self.device.release_unused()

    def close(self) -> None:
        """Forget every launcher with its workspace; arrays of others live on."""
        for kept in (self._norms, self._samplings, self._cache_ops):
            kept.clear()
        del self._linear, self._edit_logits
        del self._sampling_inputs, self._sampling_outputs, self._copied_pairs
        self.device.close()

    def bind_thread(self) -> None:
        self.device.use()

    # Profiling

    def start_profiler(self) -> RangeSink | None:
        return self.device.profiler_start()

    def stop_profiler(self) -> None:
        self.device.profiler_stop()

    # Execution

    def plan(self, meta: BatchMeta, *, num_heads: int, num_kv_heads: int) -> AttentionPlan:
        attention = self._cache_ops.attention(num_heads, num_kv_heads)
        if meta.num_prompt_tokens is None:
            work = attention.plan(meta.query_start_loc, meta.seq_lens)
        else:
            parts = split_roles(meta)
            work = attention.plan(parts.query_start_loc, parts.seq_lens, parts.is_prompt)
            meta = replace(
                meta,
                query_start_loc=parts.query_start_loc,
                seq_lens=parts.seq_lens,
                block_tables=parts.block_tables,
            )
        arrays: list[npt.NDArray[Any]] = [getattr(meta, name) for name in _INDEX_ARRAYS]
        work.upload(arrays.append)
        on_device = upload_together(self.device, arrays)
        rest = iter(on_device[len(_INDEX_ARRAYS) :])
        return AttentionPlan(
            **dict(zip(_INDEX_ARRAYS, on_device, strict=False)),
            num_tokens=len(meta.token_ids),
            work=work.upload(lambda array: next(rest)),
        )

    def static_plans(
        self, *, num_heads: int, num_kv_heads: int, max_model_len: int
    ) -> StaticPlans | None:
        attention = self._cache_ops.attention(num_heads, num_kv_heads)
        partitions = -(-max_model_len // attention.partition_tokens)

        buffer: Any = None

        def make(num_reqs: int) -> DecodePlan:
            nonlocal buffer
            plan = DecodePlan(
                self.device,
                attention,
                num_reqs=num_reqs,
                max_blocks=-(-max_model_len // attention.block_size),
                max_items=min(num_reqs * partitions, attention.max_items),
                buffer=buffer,
            )
            buffer = plan.buffer
            return plan

        return make

    def run_ahead(self, max_rows: int) -> SampleAhead:
        memory = self._sampling_inputs, self._sampling_outputs
        return SampleAhead(self.device, self._take_token_ids, self._sampling, memory, max_rows)

    def pages_ahead(self, caches: Sequence[KVCache]) -> None:
        return None

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        return self.device.capture(forward)

    def prepare(
        self, forward: Callable[[AttentionPlan], None], max_num_tokens: int
    ) -> Callable[[AttentionPlan], None]:
        return forward

    # Ops

    def embed(self, out: Any, token_ids: Any, table: LinearWeight) -> None:
        packed = _packed(table)
        self._embedding(out, token_ids, packed.weight)

    def rms_norm(self, out: Any, x: Any, weight: Any, eps: float) -> None:
        self._norm(x.shape[-1]).rms_norm(out, x, weight, eps)

    def add_rms_norm(self, out: Any, x: Any, residual: Any, weight: Any, eps: float) -> None:
        self._norm(x.shape[-1]).add_rms_norm(out, x, residual, weight, eps)

    def linear(self, out: Any, x: Any, weight: LinearWeight) -> None:
        self._linear(out, x, _packed(weight))

    def rope_and_store_kv(
        self,
        cache: KVCache,
        q: Any,
        k: Any,
        v: Any,
        positions: Any,
        cos_sin: Any,
        slot_mapping: Any,
    ) -> None:
        self._cache_ops.rope_and_store_kv(cache, q, k, v, positions, cos_sin, slot_mapping)

    def copy_blocks(
        self,
        targets: Sequence[KVCache],
        sources: Sequence[KVCache],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        check_block_pairs(targets, sources, pairs)
        if len(pairs) > 0:
            self._copy_blocks(
                [pool for cache in targets for pool in (cache.keys, cache.values)],
                [pool for cache in sources for pool in (cache.keys, cache.values)],
                upload_together(self.device, [pairs], self._copied_pairs)[0],
            )

    def paged_attention(
        self,
        out: Any,
        q: Any,
        cache: KVCache,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        self._cache_ops.paged_attention(
            out, q, cache, plan, scale=scale, sliding_window=sliding_window
        )

    def silu_and_mul(self, out: Any, gate_up: Any) -> None:
        self._silu_and_mul(out, gate_up)

    def gather_rows(self, out: Any, x: Any, rows: Any) -> None:
        self._gather(out, x, rows)

    def edit_logits(self, logits: Any, edits: LogitEdits) -> None:
        self._edit_logits(logits, edits)

    def sample(self, logits: Any, rows: SamplingRows) -> npt.NDArray[np.int32]:
        arrays = [getattr(rows, field.name) for field in fields(rows)]
        on_device = upload_together(self.device, arrays, self._sampling_inputs)
        layout = Layout()
        layout.add("token_ids", "int32", (logits.shape[0],))
        sampled = self._sampling_outputs.take(layout.nbytes)
        out = layout.views(sampled)["token_ids"]
        self._sampling(logits.shape[1]).sample(out, logits, DeviceSamplingRows(*on_device))
        return layout.views(self.device.download(sampled))["token_ids"]

    def token_logprobs(
        self, logits: Any, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows:
        n = logits.shape[0]
        [ids] = upload_together(self.device, [token_ids], self._sampling_inputs)
        layout = Layout()
        add_logprobs(layout, n, k)
        table = self._sampling_outputs.take(layout.nbytes)
        out = DeviceLogprobRows(**layout.views(table))
        self._sampling(logits.shape[1]).token_logprobs(out, logits, ids)
        return TokenLogprobRows(**layout.views(self.device.download(table)))

    def _make_linear(self) -> Linear:
        device = self.device
        tiles = linear_tiles(device.compute_capability)
        size = workspace_size(device.num_multiprocessors, tiles)
        return Linear(
            device.loader,
            dtype=self.dtype,
            tiles=tiles,
            modes=(Mode(Epilogue.STORE, self.dtype), Mode(Epilogue.STORE, "float32")),
            num_sms=device.num_multiprocessors,
            workspace=device.empty((max(size, 1),), "float32"),
        )

    def _norm(self, size: int) -> RmsNorm:
        if size not in self._norms:
            self._norms[size] = RmsNorm(self.device.loader, dtype=self.dtype, size=size)
        return self._norms[size]

    def _sampling(self, vocab_size: int) -> Sampling:
        if vocab_size not in self._samplings:
            self._samplings[vocab_size] = Sampling(self.device.loader, vocab_size=vocab_size)
        return self._samplings[vocab_size]


def _packed(weight: LinearWeight) -> PackedLinear:
    """The weight as this backend packs it."""
    if not isinstance(weight, PackedLinear):
        raise TypeError(f"a {type(weight).__name__} was packed by another backend")
    return weight
