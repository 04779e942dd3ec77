"""Paged attention on a GPU: launches gpu/kernels/paged_decode.cu and paged_prefill.cu.

`PagedAttention.plan` splits a ragged batch on the host, once a step; its work goes to the device
and serves every layer. Requests with one query are split over their keys in partitions of a fixed
number of tokens, so that their results do not depend on the batch; the others over their queries
in tiles. The two kernels write different rows of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rawpaged.errors import BackendError
from rawpaged.gpu.arrays import ArrayInfo, array_info, check
from rawpaged.gpu.attention_work import AttentionWork, DecodeWork, split_work
from rawpaged.gpu.kv_cache import (
    BLOCK_SIZES,
    ELEMENT_TYPES,
    check_cache_shape,
    check_types,
    checked_scales,
    is_cache,
    is_heads,
    is_vector,
    type_label,
)
from rawpaged.gpu.module import Instance, KernelDeclaration, Loader, instantiate, load_kernels

PARTITION_TOKENS = 256
"""Keys of a request with one query that a block takes at a time; part of its result's bits."""

_MOST_PARTITION_BLOCKS = 128
GRID_ITEMS = 1024
"""Items in flight at most; blocks then take several. A captured graph's grid stays small so."""
_THREADS = 128

_DECODE = KernelDeclaration(
    "paged_decode.cu",
    "paged_decode",
    "T* out, float* partial_out, float* partial_top, float* partial_sum, const T* q, "
    "const C* keys, const C* values, const int* block_tables, const int* seq_lens, "
    "const int* query_start_loc, const int* items, const int* sizes, const float* key_scale, "
    "const float* value_scale, const float* sinks, int has_sinks, int num_heads, "
    "int num_kv_heads, int block_shift, int max_blocks, int partition_tokens, "
    "long long q_stride, long long out_stride, float scale, float soft_cap, int window",
)
_REDUCE = KernelDeclaration(
    "paged_decode.cu",
    "paged_reduce",
    "T* out, const float* partial_out, const float* partial_top, const float* partial_sum, "
    "const int* seq_lens, const int* query_start_loc, const int* requests, "
    "const int* first_items, const int* sizes, const float* value_scale, const float* sinks, "
    "int has_sinks, int num_heads, int num_kv_heads, int partition_tokens, "
    "long long out_stride, int window",
)
_PREFILL = KernelDeclaration(
    "paged_prefill.cu",
    "paged_prefill",
    "T* out, const T* q, const C* keys, const C* values, const int* block_tables, "
    "const int* query_start_loc, const int* tiles, const float* key_scale, "
    "const float* value_scale, const float* sinks, int has_sinks, int num_heads, "
    "int num_kv_heads, int block_shift, int max_blocks, long long q_stride, "
    "long long out_stride, float scale, float soft_cap, int window",
)


class AttentionInputs(Protocol):
    """What attention reads of a plan, arrays on the device; rawpaged.backend.AttentionPlan fits."""

    @property
    def query_start_loc(self) -> Any: ...  # i32[num_reqs + 1]
    @property
    def seq_lens(self) -> Any: ...  # i32[num_reqs], keys of each request, its queries' included
    @property
    def block_tables(self) -> Any: ...  # i32[num_reqs, max_blocks]
    @property
    def work(self) -> Any: ...  # AttentionWork on the device


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """AttentionInputs for those who use the attention alone."""

    query_start_loc: Any
    seq_lens: Any
    block_tables: Any
    work: AttentionWork


@dataclass(frozen=True, slots=True)
class Workspace:
    """Results of partitions, float32; the caller allocates it and may share it among layers."""

    out: Any  # f32[num_items, num_heads, head_dim]
    top: Any  # f32[num_items, num_heads]
    sum: Any  # f32[num_items, num_heads]

    @classmethod
    def allocate(
        cls, empty: Callable[..., Any], num_items: int, num_heads: int, head_dim: int
    ) -> Workspace:
        """Arrays by `empty(shape, dtype)`, such as cupy.empty; 4 * (head_dim + 2) bytes a head."""
        rows = (num_items, num_heads)
        return cls(
            empty((*rows, head_dim), np.float32),
            empty(rows, np.float32),
            empty(rows, np.float32),
        )


def head_tiles(group: int, head_dim: int) -> int:
    """Tiles of 8 query heads of a KV head that a decode block takes; registers hold two up to 128.

    Larger groups are split over blocks, which read the same keys at the same time.
    """
    return 2 if group > 8 and head_dim <= 128 else 1


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """What a prefill block holds: 64 * row_tiles rows, keys in steps."""

    row_tiles: int
    keys: int

    @classmethod
    def of(cls, head_dim: int) -> PrefillTile:
        """The largest that 255 registers a thread and 99 KiB of shared memory hold."""
        return cls(2, 64) if head_dim <= 128 else cls(1, 32)

    @property
    def rows(self) -> int:
        return 64 * self.row_tiles

    def shared_bytes(self, head_dim: int, cache_itemsize: int) -> int:
        """Queries, keys and values in padded rows, and a cache's bytes as they arrive."""
        padded = (self.rows + 2 * self.keys) * (head_dim + 8) * 2
        return padded + (self.keys * head_dim if cache_itemsize == 1 else 0)


def decode_instances(
    dtype: str, cache_dtype: str, head_dim: int, group: int
) -> tuple[Instance, Instance]:
    """The kernels of partitions and of their combination."""
    c_type, cache_type = ELEMENT_TYPES[dtype].c_type, ELEMENT_TYPES[cache_dtype].c_type
    label, suffix = type_label(dtype, cache_dtype)
    tiles = head_tiles(group, head_dim)
    types = {"T": c_type, "C": cache_type}
    decode = instantiate(
        _DECODE,
        f"paged_decode_{label}_h{head_dim}_g{8 * tiles}{suffix}",
        (c_type, cache_type, head_dim, tiles),
        types=types,
        threads=_THREADS,
        min_blocks=3 if tiles == 1 and head_dim <= 128 else 2,
    )
    reduce = instantiate(
        _REDUCE,
        f"paged_reduce_{label}_h{head_dim}{suffix}",
        (c_type, cache_type, head_dim),
        types=types,
        threads=_THREADS,
    )
    return decode, reduce


def prefill_instance(dtype: str, cache_dtype: str, head_dim: int) -> Instance:
    """The kernel of tiles of several queries."""
    c_type, cache_type = ELEMENT_TYPES[dtype].c_type, ELEMENT_TYPES[cache_dtype].c_type
    label, suffix = type_label(dtype, cache_dtype)
    tile = PrefillTile.of(head_dim)
    return instantiate(
        _PREFILL,
        f"paged_prefill_{label}_h{head_dim}_m{tile.rows}_n{tile.keys}{suffix}",
        (c_type, cache_type, head_dim, tile.row_tiles, tile.keys),
        types={"T": c_type, "C": cache_type},
        threads=_THREADS,
        max_shared_mem=tile.shared_bytes(head_dim, ELEMENT_TYPES[cache_dtype].itemsize),
    )


class PagedAttention:
    """Causal attention over a paged cache for one shape of heads, blocks and types.

    dtype is "bfloat16" or "float16"; cache_dtype is the same, "fp8_e4m3" (arrays of uint8) or
    "int8". Raises BackendError for what the kernels do not take. `grid_items` has no influence on
    results; `partition_tokens` has.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        dtype: str,
        cache_dtype: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        workspace: Workspace,
        partition_tokens: int = PARTITION_TOKENS,
        grid_items: int = GRID_ITEMS,
    ) -> None:
        check_types(dtype, cache_dtype)
        check_cache_shape(head_dim, block_size)
        if num_heads % num_kv_heads:
            raise BackendError(f"{num_heads=} is not a multiple of {num_kv_heads=}")
        most = _MOST_PARTITION_BLOCKS * min(BLOCK_SIZES)
        if partition_tokens % 16 or not 0 < partition_tokens <= most:
            raise BackendError(f"{partition_tokens=} is not a multiple of 16 up to {most}")
        self.dtype = dtype
        self.cache_type = ELEMENT_TYPES[cache_dtype]
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.partition_tokens = partition_tokens
        self.grid_items = grid_items
        self.tile = PrefillTile.of(head_dim)
        self.max_items = self._check_workspace(workspace)
        self._workspace = workspace
        decode, reduce = decode_instances(dtype, cache_dtype, head_dim, self.group)
        prefill = prefill_instance(dtype, cache_dtype, head_dim)
        loaded = load_kernels(loader, [decode, reduce]) | load_kernels(loader, [prefill])
        self._decode, self._reduce = loaded[decode.name], loaded[reduce.name]
        self._prefill = loaded[prefill.name]

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    def plan(
        self,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        is_prefill: npt.NDArray[np.bool_] | None = None,
    ) -> AttentionWork:
        """The work of a batch, on the host; queries are a request's last positions.

        `is_prefill` bool[num_reqs] says which requests go to the prefill kernel, of whatever number
        of queries; the others have one. None: those with several.
        """
        return split_work(
            query_start_loc,
            seq_lens,
            group=self.group,
            tile_rows=self.tile.rows,
            partition_tokens=self.partition_tokens,
            max_items=self.max_items,
            is_prefill=is_prefill,
        )

    def __call__(
        self,
        out: Any,
        q: Any,
        keys: Any,
        values: Any,
        plan: AttentionInputs,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
        key_scale: Any = None,
        value_scale: Any = None,
        sinks: Any = None,
    ) -> None:
        """out T[num_tokens, num_heads, head_dim] = attention of q over each request's blocks.

        q and out may be views whose rows are whole 16 bytes apart; keys and values are
        [num_blocks, num_kv_heads, block_size, head_dim]. A query sees the positions up to its
        own, the last `sliding_window` of them if given. Scores are scale * q . k, then with
        `soft_cap` cap * tanh(score / cap). `sinks` f32[num_heads] are logits that take part in the
        softmax and have no value. Scales f32[num_kv_heads] go with caches of bytes.
        """
        to, source = array_info(out), array_info(q)
        heads = (self.num_heads, self.head_dim)
        check(
            to.shape == source.shape
            and is_heads(to, *heads, self.dtype)
            and is_heads(source, *heads, self.dtype)
            and self._is_cache(keys)
            and self._is_cache(values),
            out=out,
            q=q,
            keys=keys,
            values=values,
        )
        _check_plan(plan)
        if sinks is not None:
            check(is_vector(sinks, self.num_heads), sinks=sinks)
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"{sliding_window=} is not positive")
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"{soft_cap=} is not positive")
        scales = checked_scales(self.cache_type, self.num_kv_heads, key_scale, value_scale)
        call = _Call(
            out=out,
            q=q,
            cache=(keys, values),
            plan=plan,
            # Not read where there is none.
            scales=scales or (plan.seq_lens, plan.seq_lens),
            sinks=plan.seq_lens if sinks is None else sinks,
            has_sinks=int(sinks is not None),
            strides=(source.strides[0], to.strides[0]),
            scores=(scale, soft_cap or 0.0, sliding_window or 0),
        )
        for part in plan.work.rounds:
            self._run_decode(call, part)
        if plan.work.num_tiles > 0:
            self._run_prefill(call)

    def _run_decode(self, call: _Call, part: DecodeWork) -> None:
        space, plan = self._workspace, call.plan
        scale, soft_cap, window = call.scores
        head_blocks = -(-self.group // (8 * head_tiles(self.group, self.head_dim)))
        self._decode(
            (self.num_kv_heads * head_blocks, min(part.num_items, self.grid_items)),
            (_THREADS,),
            call.out,
            space.out,
            space.top,
            space.sum,
            call.q,
            *call.cache,
            plan.block_tables,
            plan.seq_lens,
            plan.query_start_loc,
            part.items,
            part.sizes,
            *call.scales,
            call.sinks,
            call.has_sinks,
            *self._shape(plan),
            self.partition_tokens,
            *call.strides,
            scale,
            soft_cap,
            window,
        )
        if not part.is_split:
            return  # a partition each, which wrote the output itself
        self._reduce(
            (self.num_heads, part.num_requests),
            (_THREADS,),
            call.out,
            space.out,
            space.top,
            space.sum,
            plan.seq_lens,
            plan.query_start_loc,
            part.requests,
            part.first_items,
            part.sizes,
            call.scales[1],
            call.sinks,
            call.has_sinks,
            self.num_heads,
            self.num_kv_heads,
            self.partition_tokens,
            call.strides[1],
            window,
        )

    def _run_prefill(self, call: _Call) -> None:
        plan, work = call.plan, call.plan.work
        self._prefill(
            (work.num_tiles, self.num_kv_heads),
            (_THREADS,),
            call.out,
            call.q,
            *call.cache,
            plan.block_tables,
            plan.query_start_loc,
            work.tiles,
            *call.scales,
            call.sinks,
            call.has_sinks,
            *self._shape(plan),
            *call.strides,
            *call.scores,
            shared_mem=self._prefill.instance.max_shared_mem,
        )

    def _shape(self, plan: AttentionInputs) -> tuple[int, int, int, int]:
        """num_heads, num_kv_heads, block_shift and max_blocks, as both kernels take them."""
        max_blocks = array_info(plan.block_tables).shape[1]
        return self.num_heads, self.num_kv_heads, self.block_size.bit_length() - 1, max_blocks

    def _is_cache(self, cache: Any) -> bool:
        info = array_info(cache)
        return info.dtype == self.cache_type.array_dtype and is_cache(
            info, self.num_kv_heads, self.block_size, self.head_dim
        )

    def _check_workspace(self, workspace: Workspace) -> int:
        """Number of items that fit."""
        infos = [array_info(array) for array in (workspace.out, workspace.top, workspace.sum)]
        num_items = infos[0].shape[0]
        rows = (num_items, self.num_heads)
        check(
            num_items > 0
            and [info.shape for info in infos] == [(*rows, self.head_dim), rows, rows]
            and all(info.dtype == "float32" and info.is_contiguous for info in infos)
            and infos[0].pointer % 16 == 0,
            out=workspace.out,
            top=workspace.top,
            sum=workspace.sum,
        )
        return num_items


@dataclass(frozen=True, slots=True)
class _Call:
    """Checked arguments of one call, in the order of the kernels' parameters."""

    out: Any
    q: Any
    cache: tuple[Any, Any]
    plan: AttentionInputs
    scales: tuple[Any, Any]
    sinks: Any
    has_sinks: int
    strides: tuple[int, int]  # of q and out, in elements
    scores: tuple[float, float, int]  # scale, soft cap or 0, window or 0


def _check_plan(plan: AttentionInputs) -> None:
    starts, lens, tables = (
        array_info(array) for array in (plan.query_start_loc, plan.seq_lens, plan.block_tables)
    )
    check(
        all(_is_index(info) for info in (starts, lens, tables))
        and len(tables.shape) == 2
        and lens.shape == tables.shape[:1]
        and starts.shape == (lens.shape[0] + 1,),
        query_start_loc=plan.query_start_loc,
        seq_lens=plan.seq_lens,
        block_tables=plan.block_tables,
    )


def _is_index(info: ArrayInfo) -> bool:
    return info.dtype == "int32" and info.is_contiguous
