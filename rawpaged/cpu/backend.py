"""The CPU as a backend: checks shapes, splits rows over threads, calls the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
)
from rawpaged.cpu import kv_cache
from rawpaged.cpu.activation import silu_and_mul_rows
from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.attention_work import split_work
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.cpu.cache_ops import CacheOps
from rawpaged.cpu.checks import check_shapes
from rawpaged.cpu.compiling import Kernel
from rawpaged.cpu.gather import gather_row_indices
from rawpaged.cpu.joined_linear import CpuLinear, JoinedLinear, LinearOps, pack_parts
from rawpaged.cpu.kv_ahead import KVAhead
from rawpaged.cpu.linear import ROW_GRAIN, PackedLinear, pack_linear
from rawpaged.cpu.linear_inputs import Input, target_of, words_of
from rawpaged.cpu.logprobs import logprob_rows
from rawpaged.cpu.memory import memory_info, trim_heap
from rawpaged.cpu.norm import add_rms_norm_rows, rms_norm_rows
from rawpaged.cpu.pages_ahead import PagesAhead, pages_ahead
from rawpaged.cpu.quantized_linear import QuantizedLinear
from rawpaged.cpu.repeated_forward import RepeatedForward
from rawpaged.cpu.sampling import edit_logits_entries
from rawpaged.cpu.sampling_op import SamplingOp
from rawpaged.cpu.static_plan import DecodePlans
from rawpaged.cpu.threads import PerRow, ThreadTeam
from rawpaged.cpu.weight_memory import WeightMemory
from rawpaged.tracing import RangeSink

Float32 = npt.NDArray[np.float32]

# To take a part of an op costs a few hundred nanoseconds; these come to a microsecond and more.
_EDIT_GRAIN = 512
"""Edits of logits in a part, at least."""


class CpuBackend:
    """Ops over NumPy arrays on the processors of one machine (see rawpaged.backend.Backend)."""

    name = "cpu"
    activation_dtype = "float32"
    captures_on_demand = True
    block_bits: ClassVar[Mapping[str, float]] = {
        name: kind.bits_per_weight for name, kind in BLOCK_TYPES.items()
    }

    def __init__(
        self, *, dtype: str, kv_cache_dtype: str | None = None, num_threads: int | None = None
    ) -> None:
        """kv_cache_dtype is "fp8_e4m3", "int8", or None for that of the weights."""
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype or dtype
        self._team = ThreadTeam(num_threads)
        self._weights = WeightMemory()
        self._kv_ahead = KVAhead(self._team)
        self._cache_ops = CacheOps(
            self._team, self._kv_ahead, dtype=dtype, cache_dtype=self.kv_cache_dtype
        )
        self._linear = LinearOps(self._team, dtype, self._kv_ahead)
        self._sample = SamplingOp(self._team)

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype.kind in "iu":
            return np.array(array)
        return np.array(array, np.float32)

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def pack_linear(
        self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None
    ) -> PackedLinear:
        return pack_linear(weight, bias, self.dtype, self._weights.empty)

    def pack_quantized(
        self,
        parts: Sequence[npt.NDArray[Any] | QuantizedRows],
        bias: npt.NDArray[Any] | None,
    ) -> CpuLinear:
        return pack_parts(parts, bias, self.dtype, self._weights.empty)

    def linear_input(
        self, rows: int, weights: Sequence[LinearWeight], *, piece: int | None = None
    ) -> Input:
        packed = [_packed(weight) for weight in weights]
        return self._linear.empty_input(rows, packed, piece)

    def offload_linear(self, weight: LinearWeight) -> LinearWeight:
        return weight

    def restore_linear(self, weight: LinearWeight) -> LinearWeight:
        return weight

    def kv_bytes_per_block(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        return kv_cache.bytes_per_block(num_kv_heads, head_dim, block_size, self.kv_cache_dtype)

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
        return kv_cache.magnitudes(cache, num_tokens)

    def memory_info(self) -> tuple[int, int]:
        return memory_info()

    def release_unused(self) -> None:
        self._linear.release()
        self._sample.forget()
        self._weights.release()
        trim_heap()

    def close(self) -> None:
        self._team.close()

    def bind_thread(self) -> None:
        pass

    # Profiling

    def start_profiler(self) -> RangeSink | None:
        return None

    def stop_profiler(self) -> None:
        pass

    # Execution

    def plan(self, meta: BatchMeta, *, num_heads: int, num_kv_heads: int) -> AttentionPlan:
        work = split_work(meta, num_heads, num_kv_heads, self.num_threads)
        return AttentionPlan(
            token_ids=meta.token_ids,
            positions=meta.positions,
            slot_mapping=meta.slot_mapping,
            query_start_loc=meta.query_start_loc,
            seq_lens=meta.seq_lens,
            block_tables=meta.block_tables,
            logits_rows=meta.logits_rows,
            num_tokens=len(meta.token_ids),
            work=work,
        )

    def static_plans(
        self, *, num_heads: int, num_kv_heads: int, max_model_len: int
    ) -> StaticPlans | None:
        return DecodePlans(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_model_len=max_model_len,
            num_threads=self.num_threads,
        )

    def run_ahead(self, max_rows: int) -> None:
        return None

    def pages_ahead(self, caches: Sequence[KVCache]) -> PagesAhead | None:
        return pages_ahead([pool for cache in caches for pool in (cache.keys, cache.values)])

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        return partial(self._team.replay, self._team.record(self._kv_ahead.recording(forward)))

    def prepare(
        self, forward: Callable[[AttentionPlan], None], max_num_tokens: int
    ) -> Callable[[AttentionPlan], None]:
        return RepeatedForward(self._team, self._kv_ahead.recording(forward), max_num_tokens)

    # Ops

    def embed(self, out: Float32, token_ids: npt.NDArray[np.int32], table: LinearWeight) -> None:
        packed = _packed(table)
        assert not isinstance(packed, JoinedLinear), "a table is one tensor"
        shape = (len(token_ids), packed.in_features)
        check_shapes(out.shape == shape, out=out, token_ids=token_ids)
        self._linear.embed(out, token_ids, packed)

    def rms_norm(self, out: Input, x: Float32, weight: Float32, eps: float) -> None:
        fits = out.shape == x.shape and weight.shape == x.shape[-1:]
        check_shapes(fits, out=out, x=x, weight=weight)
        self._rows(rms_norm_rows, x, target_of(out), RowsOf(x), weight, eps)

    def add_rms_norm(
        self, out: Input, x: Float32, residual: Float32, weight: Float32, eps: float
    ) -> None:
        check_shapes(
            out.shape == x.shape == residual.shape and weight.shape == x.shape[1:],
            out=out,
            x=x,
            residual=residual,
            weight=weight,
        )
        rows = (target_of(out), RowsOf(x), RowsOf(residual))
        self._rows(add_rms_norm_rows, x, *rows, weight, eps)

    def linear(self, out: Float32, x: Input, weight: LinearWeight) -> None:
        packed = _packed(weight)
        check_shapes(
            x.shape[1] == packed.in_features and out.shape == (len(x), packed.out_features),
            out=out,
            x=x,
        )
        self._linear.linear(out, x, packed)

    def rope_and_store_kv(
        self,
        cache: KVCache,
        q: Float32,
        k: Float32,
        v: Float32,
        positions: npt.NDArray[np.int32],
        cos_sin: Float32,
        slot_mapping: npt.NDArray[np.int64],
    ) -> None:
        self._cache_ops.rope_and_store_kv(cache, q, k, v, positions, cos_sin, slot_mapping)

    def copy_blocks(
        self,
        targets: Sequence[KVCache],
        sources: Sequence[KVCache],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        self._cache_ops.copy_blocks(targets, sources, pairs)

    def paged_attention(
        self,
        out: Input,
        q: Float32,
        cache: KVCache,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        self._cache_ops.paged_attention(
            out, q, cache, plan, scale=scale, sliding_window=sliding_window
        )

    def silu_and_mul(self, out: Input, gate_up: Float32) -> None:
        check_shapes(gate_up.shape == (len(out), 2 * out.shape[1]), out=out, gate_up=gate_up)
        self._rows(silu_and_mul_rows, gate_up, target_of(out), RowsOf(gate_up))

    def gather_rows(self, out: Input, x: Input, rows: npt.NDArray[np.int32]) -> None:
        target, source = words_of(out), words_of(x)
        fits = out.shape == (len(rows), x.shape[1]) and target.shape[1] == source.shape[1]
        check_shapes(fits, out=target, x=source, rows=rows)
        self._rows(gather_row_indices, target, RowsOf(target), RowsOf(source), rows)

    def edit_logits(self, logits: Float32, edits: LogitEdits) -> None:
        self._team.run(
            edit_logits_entries,
            len(edits.rows),
            logits,
            edits.rows,
            edits.token_ids,
            edits.bias,
            edits.seen,
            edits.counts,
            edits.repetition_penalty,
            edits.frequency_penalty,
            edits.presence_penalty,
            grain=_EDIT_GRAIN,
        )

    def sample(self, logits: Float32, rows: SamplingRows) -> npt.NDArray[np.int32]:
        return self._sample(logits, rows)

    def token_logprobs(
        self, logits: Float32, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows:
        n = len(logits)
        result = TokenLogprobRows(
            chosen=np.empty(n, np.float32),
            ranks=np.empty(n, np.int32),
            top_token_ids=np.empty((n, k), np.int32),
            top_logprobs=np.empty((n, k), np.float32),
        )
        self._rows(
            logprob_rows,
            logits,
            result.chosen,
            result.ranks,
            result.top_token_ids,
            result.top_logprobs,
            logits,
            token_ids,
        )
        return result

    def _rows(self, kernel: Kernel, sized: npt.NDArray[Any], *args: Any) -> None:
        """Split the rows of a row-wise kernel; `sized` says how large the work is."""
        count = len(sized)
        if count == 0:
            return
        grain = max(1, ROW_GRAIN * count // sized.size)
        self._team.run(kernel, PerRow(count), *args, grain=grain)


def _packed(weight: LinearWeight) -> CpuLinear:
    """The weight as this backend packs it."""
    if not isinstance(weight, (PackedLinear, QuantizedLinear, JoinedLinear)):
        raise TypeError(f"a {type(weight).__name__} was packed by another backend")
    return weight
