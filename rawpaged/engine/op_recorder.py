"""Writes down the ops that steps call, for `op_recording.py`; in use only while a profile runs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

import rawpaged
from rawpaged.backend import AttentionPlan, Backend, BatchMeta, KVCache, LogitEdits, SamplingRows
from rawpaged.engine.op_recording import (
    FORMAT,
    MAX_NUMBERS,
    PLAN_ARRAYS,
    VERSION,
    About,
    Arg,
    ArrayArg,
    CacheArg,
    CachesArg,
    FieldsArg,
    LinearArg,
    NumberArg,
    PlanArg,
    PlanArrayArg,
    RecordedCall,
    RecordedPlan,
    RecordedStep,
    Recording,
    RowsArg,
    SameArg,
)
from rawpaged.tracing import RangeArgs, RangeKind

RECORDED_OPS = (
    "embed",
    "rms_norm",
    "add_rms_norm",
    "linear",
    "rope_and_store_kv",
    "copy_blocks",
    "paged_attention",
    "silu_and_mul",
    "gather_rows",
    "edit_logits",
    "sample",
    "token_logprobs",
)
"""All ops of the seam; not the copies between host and device."""

_TOKENS = "token_ids"
"""Arguments of this name are what users wrote: of them only the shape is kept."""
_LARGEST = float(np.finfo(np.float32).max)


class OpRecorder:
    """What the ops of some steps were called with.

    It is a RangeSink too, from which it learns where steps begin and what they are called.
    """

    def __init__(
        self,
        backend: Backend,
        kv_caches: Callable[[], Sequence[KVCache]] = tuple,
        *,
        max_numbers: int = MAX_NUMBERS,
    ) -> None:
        """`kv_caches` gives the layers' pools on the device; all others are the host's.

        It is asked anew each time, for an engine that is put to sleep gives its pools away.
        """
        self._backend = backend
        self._kv_caches = kv_caches
        self._max_numbers = max_numbers
        self._parameters = {op: list(_parameters(op)) for op in RECORDED_OPS}
        self._plans: list[RecordedPlan] = []
        self._plan: AttentionPlan | None = None
        """The last one made, kept so that its arrays can be told by what they are."""
        self._calls: dict[bytes, int] = {}
        self._step_names: list[str] = []
        self._steps: list[list[int]] = []
        self._depth = 0
        self._numbers = 0

    @property
    def is_full(self) -> bool:
        """Whether no further step should be recorded."""
        return self._numbers >= self._max_numbers

    def ops(self) -> Backend:
        """The backend with ops that are written down."""
        return cast(Backend, _RecordedOps(self._backend, self))

    # RangeSink

    def push(self, kind: RangeKind, name: str, args: RangeArgs) -> None:
        if kind == "step":
            self._step_names.append(name)
            self._steps.append([])
        self._depth += 1

    def rename(self, name: str, args: RangeArgs) -> None:
        if self._depth == 1:
            self._step_names[-1] = name

    def pop(self) -> None:
        self._depth -= 1

    # What ops tell

    def note_plan(
        self, meta: BatchMeta, plan: AttentionPlan, num_heads: int, num_kv_heads: int
    ) -> None:
        """Keep a batch's index arrays; `plan` is what later calls refer to."""
        recorded = RecordedPlan(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            query_start_loc=_ints(meta.query_start_loc),
            seq_lens=_ints(meta.seq_lens),
            block_tables=tuple(
                _ints(row[: self._blocks_of(length)])
                for row, length in zip(meta.block_tables, meta.seq_lens.tolist(), strict=True)
            ),
            slot_mapping=_ints(meta.slot_mapping),
            logits_rows=_ints(meta.logits_rows),
            num_prompt_tokens=(
                None if meta.num_prompt_tokens is None else _ints(meta.num_prompt_tokens)
            ),
        )
        self._plans.append(recorded)
        self._plan = plan
        self._numbers += recorded.num_numbers()

    def note(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Write a call down, before it is made."""
        given = dict(zip(self._parameters[op], args, strict=False)) | dict(kwargs)
        described: dict[str, Arg] = {}
        for name, value in given.items():
            same = next((earlier for earlier in described if given[earlier] is value), None)
            if same is not None and isinstance(described[same], (ArrayArg, CachesArg)):
                described[name] = SameArg(same)
            else:
                described[name] = self._describe(name, value)
        key = msgspec.json.encode(RecordedCall(op, described))
        if key not in self._calls:
            self._calls[key] = len(self._calls)
            self._numbers += sum(map(_num_values, described.values()))
        if self._steps:
            self._steps[-1].append(self._calls[key])
            self._numbers += 1

    def recording(self) -> Recording:
        """All that was written down."""
        return Recording(
            format=FORMAT,
            version=VERSION,
            about=About(
                device=self._backend.name,
                dtype=self._backend.dtype,
                kv_cache_dtype=self._backend.kv_cache_dtype,
                activation_dtype=self._backend.activation_dtype,
                rawpaged_version=rawpaged.__version__,
            ),
            plans=tuple(self._plans),
            calls=tuple(msgspec.json.decode(key, type=RecordedCall) for key in self._calls),
            steps=tuple(
                RecordedStep(name, tuple(calls))
                for name, calls in zip(self._step_names, self._steps, strict=True)
            ),
        )

    def _blocks_of(self, length: int) -> int | None:
        """Entries of a block table that are in use; None: all, where no pool is known."""
        caches = self._kv_caches()
        return -(-length // caches[0].block_size) if caches else None

    def _describe(self, name: str, value: Any) -> Arg:
        if value is None or isinstance(value, (int, float, np.generic)):
            return NumberArg(value.item() if isinstance(value, np.generic) else value)
        if isinstance(value, AttentionPlan):
            assert value is self._plan, "a plan of an earlier step"
            return PlanArg(len(self._plans) - 1)
        if isinstance(value, KVCache):
            return _cache(value)
        if isinstance(value, (LogitEdits, SamplingRows)):
            arrays = {field.name: getattr(value, field.name) for field in fields(value)}
            described = {
                field: _array(array, with_values=field != _TOKENS)
                for field, array in arrays.items()
            }
            kind: Literal["LogitEdits", "SamplingRows"]
            kind = "LogitEdits" if isinstance(value, LogitEdits) else "SamplingRows"
            return FieldsArg(kind, described)
        if hasattr(value, "in_features"):
            parts = tuple(RowsArg(kind, rows) for kind, rows in value.row_types)
            has_blocks = any(part.type is not None for part in parts)
            return LinearArg(value.out_features, value.in_features, parts if has_blocks else ())
        if isinstance(value, (list, tuple)):
            return self._caches(value)
        return self._device_array(name, value)

    def _caches(self, caches: Sequence[KVCache]) -> CachesArg:
        on_device = any(cache.keys is caches[0].keys for cache in self._kv_caches())
        return CachesArg(len(caches), _cache(caches[0]), "device" if on_device else "host")

    def _device_array(self, name: str, value: Any) -> ArrayArg | PlanArrayArg:
        if self._plan is not None:
            for field in PLAN_ARRAYS:
                if getattr(self._plan, field) is value:
                    return PlanArrayArg(len(self._plans) - 1, field)
        is_index = np.dtype(value.dtype).kind in "iu" and name != _TOKENS
        return _array(self._backend.download(value) if is_index else value, with_values=is_index)


class _RecordedOps:
    """A backend that notes its ops' calls, and is the one behind it for everything else."""

    def __init__(self, inner: Backend, recorder: OpRecorder) -> None:
        self._inner = inner
        self._recorder = recorder
        for op in RECORDED_OPS:
            setattr(self, op, self._noted(op, getattr(inner, op)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan(self, meta: BatchMeta, *, num_heads: int, num_kv_heads: int) -> AttentionPlan:
        plan = self._inner.plan(meta, num_heads=num_heads, num_kv_heads=num_kv_heads)
        self._recorder.note_plan(meta, plan, num_heads, num_kv_heads)
        return plan

    def _noted(self, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._recorder.note(op, args, kwargs)
            return call(*args, **kwargs)

        return noted


def _parameters(op: str) -> list[str]:
    return list(inspect.signature(getattr(Backend, op)).parameters)[1:]


def _cache(cache: KVCache) -> CacheArg:
    """Backends order a block's axes as they like, but blocks come first and KV heads second."""
    num_blocks, num_kv_heads, *rest = cache.keys.shape
    return CacheArg(num_blocks, num_kv_heads, math.prod(rest) // cache.block_size, cache.block_size)


def _array(value: Any, *, with_values: bool) -> ArrayArg:
    dtype, shape = np.dtype(value.dtype), tuple(value.shape)
    row_stride = None
    if len(shape) > 1 and shape[0] > 1:
        stride = value.strides[0] // dtype.itemsize
        row_stride = stride if stride != math.prod(shape[1:]) else None
    return ArrayArg(shape, dtype.name, row_stride, _numbers(value) if with_values else None)


def _numbers(value: npt.NDArray[Any]) -> tuple[int | float, ...]:
    if value.dtype.kind == "f":
        value = np.nan_to_num(value.astype(np.float64), posinf=_LARGEST, neginf=-_LARGEST)
    elif value.dtype.kind == "b":
        value = value.astype(np.uint8)
    return tuple(value.reshape(-1).tolist())


def _ints(value: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(value.tolist())


def _num_values(arg: Arg) -> int:
    if isinstance(arg, FieldsArg):
        return sum(map(_num_values, arg.arrays.values()))
    return len(arg.values or ()) if isinstance(arg, ArrayArg) else 0
