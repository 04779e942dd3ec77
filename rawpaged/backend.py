"""The seam between the engine and a device: the ops and calls that `cpu/` and `gpu/` implement.

Array types: `act` stands for the backend's activation_dtype (float32 on the CPU).

Every op writes to its first argument, allocates nothing that outlives the step, and computes each
output row from that row's inputs alone in one fixed order, so that a row's bits do not depend on
the rest of the batch. Model code slices and reshapes arrays and calls ops; it does no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rawpaged.tracing import RangeSink


class Array(Protocol):
    """Array on the device: a NumPy array on the CPU, a CuPy array on a GPU."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def reshape(self, shape: tuple[int, ...], /) -> Any: ...


class LinearWeight(Protocol):
    """A weight [out_features, in_features] and its bias in the device's own layout."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def row_types(self) -> tuple[tuple[str | None, int], ...]:
        """(type of a GGUF file's blocks, rows) from first row to last; None: floats."""
        ...


LARGEST_ELEMENT = {"fp8_e4m3": 448.0, "int8": 127.0}
"""The largest number that an element of a cache of bytes is, by kv_cache_dtype."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of one layer's keys and values on the host, f32[num_kv_heads] each.

    A cache of bytes holds x / scale, rounded to nearest even and clamped to the finite range.
    Raises ValueError unless all are positive and finite.
    """

    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        for scale in (self.keys, self.values):
            if scale.dtype != np.float32 or scale.ndim != 1 or scale.shape != self.keys.shape:
                raise ValueError(f"scales are {scale.dtype}{list(scale.shape)}, not f32[heads]")
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise ValueError(f"scales must be positive and finite, not {scale.tolist()}")


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A weight as a GGUF file stores it: rows of blocks, of a type named as there."""

    type_name: str
    blocks: npt.NDArray[np.uint8]  # u8[out_features, row_bytes]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer; the layout is the backend's (`cpu/kv_cache.py`)."""

    keys: Any
    values: Any
    block_size: int
    key_scale: Any = None  # f32[num_kv_heads] for a cache of bytes, else None
    value_scale: Any = None


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """One ragged batch on the host: requests r with tokens [query_start_loc[r], ...[r + 1])."""

    token_ids: npt.NDArray[np.int32]  # i32[num_tokens]; negative: see RunAhead.take_token_ids
    positions: npt.NDArray[np.int32]  # i32[num_tokens]
    slot_mapping: npt.NDArray[np.int64]  # i64[num_tokens], block_id * block_size + offset, or -1
    query_start_loc: npt.NDArray[np.int32]  # i32[num_reqs + 1]
    seq_lens: npt.NDArray[np.int32]  # i32[num_reqs], tokens of KV after the step
    block_tables: npt.NDArray[np.int32]  # i32[num_reqs, max_blocks]
    logits_rows: npt.NDArray[np.int32]  # i32[num_rows], token rows whose logits are wanted
    num_prompt_tokens: npt.NDArray[np.int32] | None = None
    """i32[num_reqs]. Where it is given, the kernel that takes a token may depend on whether the
    token is one of the prompt's, and on nothing else of the batch."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """A batch of one token a request, by row: numbers, since an array costs more to make."""

    token_ids: Sequence[int]  # negative: see RunAhead.take_token_ids
    positions: Sequence[int]  # so many tokens of KV are before this one's
    slots: Sequence[int]  # as BatchMeta.slot_mapping
    block_tables: Sequence[tuple[int, ...]]
    """Those of requests whose blocks are still the same are the same objects."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A batch's index arrays on the device, made once a step and used by every layer.

    Those of attention, from query_start_loc to block_tables, may be of parts of requests, as the
    backend splits them.
    """

    token_ids: Any  # i32[num_tokens]
    positions: Any  # i32[num_tokens]
    slot_mapping: Any  # i64[num_tokens]
    query_start_loc: Any  # i32[num_reqs + 1]
    seq_lens: Any  # i32[num_reqs]
    block_tables: Any  # i32[num_reqs, max_blocks]
    logits_rows: Any  # i32[num_rows]
    num_tokens: int
    work: Any
    """How the backend splits attention over its processors."""


class StaticPlan(Protocol):
    """A plan for steps of one token a request whose arrays keep their place, for graphs.

    Plans that one function made may share memory: who has filled one fills another before its use.
    """

    @property
    def plan(self) -> AttentionPlan: ...
    def fill(self, batch: DecodeBatch) -> bool:
        """Put a batch of as many requests or fewer in; the rest of the rows do nothing.

        False if its keys are more than the plan's workspace holds: then nothing has changed.
        """
        ...


StaticPlans = Callable[[int], StaticPlan]
"""Makes a static plan for so many requests."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Sparse changes to logits before sampling, one entry a (row, token), each pair once.

    logit += bias; then, for a token seen in prompt or output, the row's repetition penalty;
    then the row's frequency penalty times `count` and its presence penalty if count > 0.
    """

    rows: npt.NDArray[np.int32]  # i32[n]
    token_ids: npt.NDArray[np.int32]  # i32[n]
    bias: npt.NDArray[np.float32]  # f32[n], -inf forbids the token
    seen: npt.NDArray[np.bool_]  # bool[n]
    counts: npt.NDArray[np.int32]  # i32[n], occurrences in the output
    repetition_penalty: npt.NDArray[np.float32]  # f32[num_rows]
    frequency_penalty: npt.NDArray[np.float32]  # f32[num_rows]
    presence_penalty: npt.NDArray[np.float32]  # f32[num_rows]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters by row of logits."""

    temperature: npt.NDArray[np.float32]  # f32[num_rows], 0: greedy
    top_k: npt.NDArray[np.int32]  # i32[num_rows], 0: all
    top_p: npt.NDArray[np.float32]  # f32[num_rows]
    min_p: npt.NDArray[np.float32]  # f32[num_rows]
    seeds: npt.NDArray[np.uint64]  # u64[num_rows], key of the counter-based generator
    positions: npt.NDArray[np.uint32]  # u32[num_rows], position of the token drawn
    sample_indices: npt.NDArray[np.uint32]  # u32[num_rows], apart at one seed and position


@dataclass(frozen=True, slots=True)
class TokenLogprobRows:
    """Natural-log probabilities by row of logits, on the host."""

    chosen: npt.NDArray[np.float32]  # f32[num_rows]
    ranks: npt.NDArray[np.int32]  # i32[num_rows], 1 + number of strictly likelier tokens
    top_token_ids: npt.NDArray[np.int32]  # i32[num_rows, k], likeliest first, ties by lower id
    top_logprobs: npt.NDArray[np.float32]  # f32[num_rows, k]


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What sampling has brought, on the host."""

    token_ids: npt.NDArray[np.int32]  # i32[num_rows]
    logprobs: TokenLogprobRows | None
    """None if none were wanted."""


class PagesAhead(Protocol):
    """Takes memory of a KV pool from the system shortly before it is written."""

    def begin_step(self, num_reached_blocks: int) -> None:
        """Blocks from that one on have never been used, nor are they in this step."""
        ...

    def end_step(self) -> None:
        """The step is over, or another has begun."""
        ...

    def close(self) -> None:
        """Take no more, and forget the pool."""
        ...


class RunAhead(Protocol):
    """Sampling that the host does not wait for, and steps over tokens that it does not know yet.

    Everything is in order with the backend's ops. It keeps the token ids of the last sampling on
    the device, in one place, so that graphs may refer to them.
    """

    def sample(
        self, logits: Any, rows: SamplingRows, *, reported: Any, num_logprobs: int | None
    ) -> Callable[[], DrawnTokens]:
        """`Backend.sample` of logits f32[num_rows, vocab], and, unless num_logprobs is None,
        `Backend.token_logprobs` of the drawn tokens in `reported`, which are such logits too.

        What it returns waits for them, and for nothing that is queued later. It may be called
        until the next sampling, or never.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """What it returns waits for all that has been queued, and for nothing that is later."""
        ...

    def take_token_ids(self, token_ids: Any) -> None:
        """In token_ids i32[n], in place: -1 - r becomes what the last sampling drew for row r.

        What it drew from broken logits, -1, becomes 0.
        """
        ...


class Backend(Protocol):
    """One device with its weights' type; all arrays passed to its ops are its own."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """Type of weights: "bfloat16", "float16" or "float32"."""
        ...

    @property
    def kv_cache_dtype(self) -> str:
        """Type of the KV cache: that of the weights, or "fp8_e4m3" or "int8"."""
        ...

    @property
    def activation_dtype(self) -> str:
        """Type of activations between ops; the residual stream and logits are float32."""
        ...

    @property
    def captures_on_demand(self) -> bool:
        """Whether a capture costs so little that decode batches of each size have their own, made
        when first met, and that traced steps do without, so that each op is seen.

        Otherwise there are a few, made at the start, and batches are padded.
        """
        ...

    @property
    def block_bits(self) -> Mapping[str, float]:
        """Types of GGUF's blocks that weights may stay in, and what one weight then takes in bits;
        empty where weights have to be dequantised."""
        ...

    # Memory
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def upload(self, array: npt.NDArray[Any]) -> Any:
        """Copy a vector or table to the device as float32 or, for integers, as it is."""
        ...

    def download(self, array: Any) -> npt.NDArray[Any]: ...
    def pack_linear(
        self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None
    ) -> LinearWeight:
        """Lay out float weight [out_features, in_features] for `linear` and `embed`."""
        ...

    def pack_quantized(
        self,
        parts: Sequence[npt.NDArray[Any] | QuantizedRows],
        bias: npt.NDArray[Any] | None,
    ) -> LinearWeight:
        """Lay out the rows of all parts as one weight, blocks as blocks, bit for bit.

        Blocks are of the types in `block_bits`. Raises BackendError where there are none.
        """
        ...

    def linear_input(
        self, rows: int, weights: Sequence[LinearWeight], *, piece: int | None = None
    ) -> Any:
        """Room for x act[rows, in_features] of `linear` with any of the weights.

        What it holds is the backend's: to be sliced by rows, reshaped but for the rows, and written
        and read by ops alone. An op writes whole rows at a time, or `piece` columns.
        """
        ...

    def offload_linear(self, weight: LinearWeight) -> LinearWeight:
        """The weight in host memory, for `restore_linear` alone; itself where it lies there."""
        ...

    def restore_linear(self, weight: LinearWeight) -> LinearWeight:
        """What `offload_linear` took, bit for bit."""
        ...

    def kv_bytes_per_block(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of one block in one layer as kv_cache_dtype, padding included."""
        ...

    def new_kv_cache(
        self,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None = None,
    ) -> KVCache:
        """One layer's pool; raises BackendError when the block size is not supported.

        With scales its elements are kv_cache_dtype, which is then one of bytes; without, they are
        of the weights' type whatever kv_cache_dtype is.
        """
        ...

    def new_host_kv_cache(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> KVCache:
        """One layer's pool in host memory, laid out like `new_kv_cache`'s, for `copy_blocks` alone.

        On a GPU it is pinned: the host cannot swap it out, and it is taken at once, all of it.
        """
        ...

    def kv_magnitudes(self, cache: KVCache, num_tokens: int) -> npt.NDArray[np.float32]:
        """Largest magnitude of keys and of values by head, f32[2, num_kv_heads] on the host.

        Of the first slots of a pool without scales; NaN for a head that holds one.
        """
        ...

    def memory_info(self) -> tuple[int, int]:
        """(available, total) bytes of the device's memory."""
        ...

    def release_unused(self) -> None:
        """Give memory that no array uses any more back to the system or the device."""
        ...

    def close(self) -> None:
        """Stop the backend's threads and give back what it holds."""
        ...

    def bind_thread(self) -> None:
        """To be called once by a thread that did not open the backend and will call its ops."""
        ...

    # Profiling
    def start_profiler(self) -> RangeSink | None:
        """Turn the device's own profiler on; takes ranges for it, None if there is none."""
        ...

    def stop_profiler(self) -> None:
        """Turn it off, after everything queued before."""
        ...

    # Execution
    def plan(self, meta: BatchMeta, *, num_heads: int, num_kv_heads: int) -> AttentionPlan:
        """Index arrays and work split for one step, used by all layers."""
        ...

    def static_plans(
        self, *, num_heads: int, num_kv_heads: int, max_model_len: int
    ) -> StaticPlans | None:
        """For decode steps as captured graphs; None where they would gain nothing."""
        ...

    def run_ahead(self, max_rows: int) -> RunAhead | None:
        """For steps that overlap, with at most max_rows rows of logits.

        None where ops have computed when they return, so that nothing would overlap.
        """
        ...

    def pages_ahead(self, caches: Sequence[KVCache]) -> PagesAhead | None:
        """For pools whose memory the system gives as they are written; None for others."""
        ...

    def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
        """A callable that repeats the ops that `forward` calls over the same arrays."""
        ...

    def prepare(
        self, forward: Callable[[AttentionPlan], None], max_num_tokens: int
    ) -> Callable[[AttentionPlan], None]:
        """forward for plans of up to so many tokens, as one piece of work where that gains.

        It may be called once, with a plan of max_num_tokens, and repeated for others: so it must
        call the same ops each time, over as many rows of the same arrays as the plan has tokens.
        """
        ...

    # Ops
    def embed(self, out: Any, token_ids: Any, table: LinearWeight) -> None:
        """out f32[n, hidden], the residual stream, = rows `token_ids` of the table."""
        ...

    def rms_norm(self, out: Any, x: Any, weight: Any, eps: float) -> None:
        """Normalise the last axis of x, the residual f32[n, d] or a view act[n, heads, d].

        out is act of the same shape, and may be x.
        """
        ...

    def add_rms_norm(self, out: Any, x: Any, residual: Any, weight: Any, eps: float) -> None:
        """residual f32[n, d] += x act[n, d], in place; out act[n, d] = rms_norm(residual)."""
        ...

    def linear(self, out: Any, x: Any, weight: LinearWeight) -> None:
        """out [n, out_features] = x act[n, in_features] @ weight.T + bias; out act or f32."""
        ...

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
        """Rotate q act[n, num_heads, head_dim] in place; write rotated k, and v, to the slots.

        k and v are views act[n, num_kv_heads, head_dim], which stay as they are; cos_sin is
        f32[max_len, head_dim], cosines first. A negative slot leaves its token out of the cache.
        """
        ...

    def copy_blocks(
        self,
        targets: Sequence[KVCache],
        sources: Sequence[KVCache],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        """Copy keys and values of whole blocks: for every layer, block dst of its target = block
        src of its source, for (src, dst) in pairs i64[n, 2], which is on the host.

        A pool is a device's or a host's (`new_host_kv_cache`). A target may be its own source. No
        block is written twice or both read and written: raises ValueError (`check_block_pairs`).
        """
        ...

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
        """Causal attention of q act[n, num_heads, head_dim] over each request's blocks.

        out act of that shape; it may be a `linear_input` with pieces of head_dim.
        """
        ...

    def silu_and_mul(self, out: Any, gate_up: Any) -> None:
        """out act[n, d] = silu(gate) * up, with gate_up act[n, 2 * d] = [gate | up]."""
        ...

    def gather_rows(self, out: Any, x: Any, rows: Any) -> None:
        """out [len(rows), d] = x[rows]; both of one type."""
        ...

    def edit_logits(self, logits: Any, edits: LogitEdits) -> None:
        """Apply the edits in place."""
        ...

    def sample(self, logits: Any, rows: SamplingRows) -> npt.NDArray[np.int32]:
        """Draw one token id a row of logits f32[num_rows, vocab]; ids i32[num_rows] on the host."""
        ...

    def token_logprobs(
        self, logits: Any, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows:
        """Log-probabilities of the given tokens and of the k likeliest, by row."""
        ...


def check_block_pairs(
    targets: Sequence[KVCache], sources: Sequence[KVCache], pairs: npt.NDArray[np.int64]
) -> None:
    """Raise ValueError unless `copy_blocks` may run: it writes wherever `pairs` says, unasked."""
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype != np.int64:
        raise ValueError(f"pairs are i64[n, 2], not {pairs.dtype}{list(pairs.shape)}")
    if len(targets) != len(sources):
        raise ValueError(f"{len(targets)} target layers and {len(sources)} source layers")
    if len(pairs) == 0:
        return
    for caches, ids, role in ((sources, pairs[:, 0], "source"), (targets, pairs[:, 1], "target")):
        num_blocks = min((cache.keys.shape[0] for cache in caches), default=0)
        if ids.min() < 0 or ids.max() >= num_blocks:
            raise ValueError(f"{role} blocks {ids.tolist()} are not all in [0, {num_blocks})")
    if len(np.unique(pairs[:, 1])) < len(pairs):
        raise ValueError(f"a block is written twice: {pairs.tolist()}")
    within = {id(cache.keys) for cache in targets} & {id(cache.keys) for cache in sources}
    if within and len(np.intersect1d(pairs[:, 0], pairs[:, 1])) > 0:
        raise ValueError(f"a block is both read and written: {pairs.tolist()}")


def check_scales(scales: KVScales, num_kv_heads: int, kv_cache_dtype: str) -> None:
    """Raise ValueError unless a cache of kv_cache_dtype with so many heads has such scales."""
    if kv_cache_dtype not in LARGEST_ELEMENT:
        raise ValueError(f"a cache of {kv_cache_dtype} has no scales")
    if scales.keys.shape != (num_kv_heads,):
        raise ValueError(f"{len(scales.keys)} scales do not fit {num_kv_heads=}")
