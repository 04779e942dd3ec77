"""A backend whose ops are ranges of a trace; put before the real one only while a profile runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import (
    AttentionPlan,
    Backend,
    BatchMeta,
    DrawnTokens,
    KVCache,
    KVScales,
    LinearWeight,
    LogitEdits,
    PagesAhead,
    QuantizedRows,
    RunAhead,
    SamplingRows,
    StaticPlans,
    TokenLogprobRows,
)
from rawpaged.tracing import RangeSink, Tracer


class TracedBackend:
    """Calls `inner` for everything; the ops and copies are ranges named by op and shape.

    On a GPU a range lasts as long as its launch takes, not its kernel.
    """

    def __init__(self, inner: Backend, tracer: Tracer) -> None:
        self._inner = inner
        self._op = tracer.op

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def dtype(self) -> str:
        return self._inner.dtype

    @property
    def kv_cache_dtype(self) -> str:
        return self._inner.kv_cache_dtype

    @property
    def activation_dtype(self) -> str:
        return self._inner.activation_dtype

    @property
    def captures_on_demand(self) -> bool:
        return self._inner.captures_on_demand

    @property
    def block_bits(self) -> Mapping[str, float]:
        return self._inner.block_bits

    # Memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._inner.empty(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        with self._op("upload", array.shape, {"bytes": array.nbytes}):
            return self._inner.upload(array)

    def download(self, array: Any) -> npt.NDArray[Any]:
        with self._op("download", array.shape, {"bytes": array.nbytes}):
            return self._inner.download(array)

    def pack_linear(
        self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None
    ) -> LinearWeight:
        return self._inner.pack_linear(weight, bias)

    def pack_quantized(
        self,
        parts: Sequence[npt.NDArray[Any] | QuantizedRows],
        bias: npt.NDArray[Any] | None,
    ) -> LinearWeight:
        return self._inner.pack_quantized(parts, bias)

    def linear_input(
        self, rows: int, weights: Sequence[LinearWeight], *, piece: int | None = None
    ) -> Any:
        return self._inner.linear_input(rows, weights, piece=piece)

    def offload_linear(self, weight: LinearWeight) -> LinearWeight:
        return self._inner.offload_linear(weight)

    def restore_linear(self, weight: LinearWeight) -> LinearWeight:
        return self._inner.restore_linear(weight)

    def kv_bytes_per_block(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        return self._inner.kv_bytes_per_block(num_kv_heads, head_dim, block_size)

    def new_kv_cache(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None = None,
    ) -> KVCache:
        return self._inner.new_kv_cache(num_blocks, num_kv_heads, head_dim, block_size, scales)

    def new_host_kv_cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> KVCache:
        return self._inner.new_host_kv_cache(num_blocks, num_kv_heads, head_dim, block_size)

    def kv_magnitudes(self, cache: KVCache, num_tokens: int) -> npt.NDArray[np.float32]:
        return self._inner.kv_magnitudes(cache, num_tokens)

    def memory_info(self) -> tuple[int, int]:
        return self._inner.memory_info()

    def release_unused(self) -> None:
        self._inner.release_unused()

    def close(self) -> None:
        self._inner.close()

    def bind_thread(self) -> None:
        self._inner.bind_thread()

    # Profiling

    def start_profiler(self) -> RangeSink | None:
        return self._inner.start_profiler()

    def stop_profiler(self) -> None:
        self._inner.stop_profiler()

    # Execution

    def plan(self, meta: BatchMeta, *, num_heads: int, num_kv_heads: int) -> AttentionPlan:
        return self._inner.plan(meta, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def static_plans(
        self, *, num_heads: int, num_kv_heads: int, max_model_len: int
    ) -> StaticPlans | None:
        return self._inner.static_plans(
            num_heads=num_heads, num_kv_heads=num_kv_heads, max_model_len=max_model_len
        )

    def run_ahead(self, max_rows: int) -> RunAhead | None:
        return self._inner.run_ahead(max_rows)

    def pages_ahead(self, caches: Sequence[KVCache]) -> PagesAhead | None:
        return self._inner.pages_ahead(caches)

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        return self._inner.capture(forward)

    def prepare(
        self, forward: Callable[[AttentionPlan], None], max_num_tokens: int
    ) -> Callable[[AttentionPlan], None]:
        """forward itself: op by op, since they are what is to be seen."""
        return forward

    # Ops

    def embed(self, out: Any, token_ids: Any, table: LinearWeight) -> None:
        with self._op("embed", out.shape, {"out": out.shape, "vocab_size": table.out_features}):
            self._inner.embed(out, token_ids, table)

    def rms_norm(self, out: Any, x: Any, weight: Any, eps: float) -> None:
        with self._op("rms_norm", x.shape, {"x": x.shape}):
            self._inner.rms_norm(out, x, weight, eps)

    def add_rms_norm(self, out: Any, x: Any, residual: Any, weight: Any, eps: float) -> None:
        with self._op("add_rms_norm", x.shape, {"x": x.shape}):
            self._inner.add_rms_norm(out, x, residual, weight, eps)

    def linear(self, out: Any, x: Any, weight: LinearWeight) -> None:
        dims = (x.shape[0], weight.in_features, weight.out_features)
        args = {"x": x.shape, "out": out.shape, "weight_bytes": weight.nbytes}
        with self._op("linear", dims, args):
            self._inner.linear(out, x, weight)

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
        args = {"q": q.shape, "k": k.shape, "block_size": cache.block_size}
        with self._op("rope_and_store_kv", q.shape, args):
            self._inner.rope_and_store_kv(cache, q, k, v, positions, cos_sin, slot_mapping)

    def copy_blocks(
        self,
        targets: Sequence[KVCache],
        sources: Sequence[KVCache],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        args = {"pairs": pairs.shape, "num_layers": len(targets)}
        with self._op("copy_blocks", pairs.shape[:1], args):
            self._inner.copy_blocks(targets, sources, pairs)

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
        args = {
            "q": q.shape,
            "block_tables": plan.block_tables.shape,
            "block_size": cache.block_size,
            "sliding_window": sliding_window,
        }
        with self._op("paged_attention", q.shape, args):
            self._inner.paged_attention(
                out, q, cache, plan, scale=scale, sliding_window=sliding_window
            )

    def silu_and_mul(self, out: Any, gate_up: Any) -> None:
        with self._op("silu_and_mul", out.shape, {"gate_up": gate_up.shape, "out": out.shape}):
            self._inner.silu_and_mul(out, gate_up)

    def gather_rows(self, out: Any, x: Any, rows: Any) -> None:
        with self._op("gather_rows", out.shape, {"x": x.shape, "out": out.shape}):
            self._inner.gather_rows(out, x, rows)

    def edit_logits(self, logits: Any, edits: LogitEdits) -> None:
        args = {"logits": logits.shape, "num_edits": len(edits.rows)}
        with self._op("edit_logits", logits.shape, args):
            self._inner.edit_logits(logits, edits)

    def sample(self, logits: Any, rows: SamplingRows) -> npt.NDArray[np.int32]:
        with self._op("sample", logits.shape, {"logits": logits.shape}):
            return self._inner.sample(logits, rows)

    def token_logprobs(
        self, logits: Any, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows:
        with self._op("token_logprobs", logits.shape, {"logits": logits.shape, "k": k}):
            return self._inner.token_logprobs(logits, token_ids, k)


class TracedRunAhead:
    """Calls `inner`, each call a range."""

    def __init__(self, inner: RunAhead, tracer: Tracer) -> None:
        self._inner = inner
        self._op = tracer.op

    def sample(
        self, logits: Any, rows: SamplingRows, *, reported: Any, num_logprobs: int | None
    ) -> Callable[[], DrawnTokens]:
        args = {"logits": logits.shape, "num_logprobs": num_logprobs}
        with self._op("sample", logits.shape, args):
            return self._inner.sample(logits, rows, reported=reported, num_logprobs=num_logprobs)

    def mark(self) -> Callable[[], None]:
        return self._inner.mark()

    def take_token_ids(self, token_ids: Any) -> None:
        with self._op("take_token_ids", token_ids.shape, {"token_ids": token_ids.shape}):
            self._inner.take_token_ids(token_ids)
