"""Recordings of ops: which calls some steps made, with shapes, scalars and index arrays, as JSON.

A recording is enough to make the same calls again over other numbers, one by one, under a profiler
or a checker (`python -m bench.run ops --replay FILE`). It holds no token ids, no text and no
weights. docs/profiling.md describes the file; what is read is checked as if somebody hostile had
written it.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from rawpaged.errors import RecordingError

FORMAT: Literal["rawpaged-ops"] = "rawpaged-ops"
VERSION: Literal[1] = 1
MAX_FILE_BYTES = 64 * 2**20
MAX_NUMBERS = 4_000_000
"""Indices and calls after which a recording takes no further step: a few dozen MB of JSON."""

PlanArrayName = Literal[
    "token_ids",
    "positions",
    "slot_mapping",
    "query_start_loc",
    "seq_lens",
    "block_tables",
    "logits_rows",
]
PLAN_ARRAYS: tuple[PlanArrayName, ...] = get_args(PlanArrayName)

_LARGEST = 3.4028234663852886e38
"""The largest float32."""
_LIMITS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "bool": (0, 1),
}

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Slot = Annotated[int, msgspec.Meta(ge=-1, le=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=100)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Number = int | float


class _Arg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """An argument of an op."""


class ArrayArg(_Arg, tag="array", frozen=True, omit_defaults=True):
    """An array on the device or the host; with contents if they are indices or parameters."""

    shape: tuple[_Size, ...]
    dtype: _Name
    row_stride: _Size | None = None
    """Elements from one row to the next, where rows do not follow each other: a view."""
    values: tuple[_Number, ...] | None = None
    """Flat; an infinite one is the largest float32."""


class SameArg(_Arg, tag="same", frozen=True):
    """The object that an earlier argument of the call is."""

    name: _Name


class PlanArg(_Arg, tag="plan", frozen=True):
    """An AttentionPlan."""

    plan: _Size


class PlanArrayArg(_Arg, tag="plan_array", frozen=True):
    """An array of an AttentionPlan."""

    plan: _Size
    name: PlanArrayName


class NumberArg(_Arg, tag="number", frozen=True):
    value: _Number | None


class RowsArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Neighbouring rows of a weight."""

    type: _Name | None
    """Of a GGUF file's blocks; None: floats."""
    rows: _Count


class LinearArg(_Arg, tag="linear", frozen=True, omit_defaults=True):
    """A packed weight."""

    out_features: _Count
    in_features: _Count
    row_types: tuple[RowsArg, ...] = ()
    """From first row to last; none: floats all."""


class CacheArg(_Arg, tag="cache", frozen=True):
    """One layer's pool of KV blocks."""

    num_blocks: _Count
    num_kv_heads: _Count
    head_dim: _Count
    block_size: _Count


class CachesArg(_Arg, tag="caches", frozen=True):
    """The pools of all layers, of one shape, in the device's memory or in the host's."""

    num_layers: _Count
    cache: CacheArg
    memory: Literal["device", "host"]


class FieldsArg(_Arg, tag="fields", frozen=True):
    """LogitEdits or SamplingRows: host arrays by name."""

    type: Literal["LogitEdits", "SamplingRows"]
    arrays: dict[_Name, ArrayArg]


Arg = (
    ArrayArg
    | SameArg
    | PlanArg
    | PlanArrayArg
    | NumberArg
    | LinearArg
    | CacheArg
    | CachesArg
    | FieldsArg
)


class RecordedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One op with its arguments by name."""

    op: _Name
    args: dict[_Name, Arg]


class RecordedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A BatchMeta without its tokens; positions follow from the lengths."""

    num_heads: _Count
    num_kv_heads: _Count
    query_start_loc: tuple[_Size, ...]
    seq_lens: tuple[_Count, ...]
    block_tables: tuple[tuple[_Size, ...], ...]
    """Of each request, without what fills a row up to the longest."""
    slot_mapping: tuple[_Slot, ...]
    logits_rows: tuple[_Size, ...]
    num_prompt_tokens: tuple[_Size, ...] | None = None
    """With --batch-invariant on a GPU, where it decides which kernel takes a token."""

    @property
    def num_tokens(self) -> int:
        return self.query_start_loc[-1]

    def num_numbers(self) -> int:
        """Indices in it."""
        tables = sum(map(len, self.block_tables))
        return tables + 2 * len(self.seq_lens) + len(self.slot_mapping) + len(self.logits_rows)


class RecordedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine called in one step, in order, as indices into the recording's calls."""

    name: _Text
    calls: tuple[_Size, ...]


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a recording was made."""

    device: _Name
    dtype: _Name
    """Of weights."""
    kv_cache_dtype: _Name
    activation_dtype: _Name
    rawpaged_version: _Name


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps of an engine; equal calls are there once."""

    format: Literal["rawpaged-ops"]
    version: Literal[1]
    about: About
    plans: tuple[RecordedPlan, ...]
    calls: tuple[RecordedCall, ...]
    steps: tuple[RecordedStep, ...]


def write_recording(path: Path, recording: Recording) -> None:
    """Write the file whole or not at all. Raises OSError, and RecordingError if it is too large."""
    content = msgspec.json.encode(recording)
    if len(content) > MAX_FILE_BYTES:
        raise RecordingError(
            f"a recording of {len(content)} bytes is more than {MAX_FILE_BYTES}; record fewer steps"
        )
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_recording(path: Path) -> Recording:
    """A recording that is whole and consistent in itself. Raises RecordingError otherwise."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise RecordingError(f"{path}: more than {MAX_FILE_BYTES} bytes are no recording")
    try:
        recording = msgspec.json.decode(content, type=Recording)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordingError(f"{path}: no recording of ops: {error}") from error
    try:
        _check(recording)
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    return recording


def _check(recording: Recording) -> None:
    """Raise ValueError for references to nothing and for plans that are no batch."""
    for index, plan in enumerate(recording.plans):
        _check_plan(plan, f"plan {index}")
    for index, call in enumerate(recording.calls):
        for name, arg in call.args.items():
            _check_arg(recording, call, arg, f"call {index}, {call.op}: {name}")
    for step in recording.steps:
        if any(call >= len(recording.calls) for call in step.calls):
            raise ValueError(f"{step.name!r} makes a call that is not there")


def _check_plan(plan: RecordedPlan, what: str) -> None:
    starts, num_reqs = plan.query_start_loc, len(plan.seq_lens)
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if not starts or starts[0] != 0 or len(lengths) != num_reqs or num_reqs == 0:
        raise ValueError(f"{what}: query_start_loc has not an entry more than seq_lens, from 0")
    if any(not 0 < n <= seq_len for n, seq_len in zip(lengths, plan.seq_lens, strict=True)):
        raise ValueError(f"{what}: a request has no tokens, or more than its seq_len")
    prompts = plan.num_prompt_tokens
    if prompts is not None and len(prompts) != num_reqs:
        raise ValueError(f"{what}: {len(prompts)} num_prompt_tokens of {num_reqs} requests")
    if len(plan.block_tables) != num_reqs:
        raise ValueError(f"{what}: {len(plan.block_tables)} block tables of {num_reqs} requests")
    if len(plan.slot_mapping) != plan.num_tokens:
        raise ValueError(f"{what}: {len(plan.slot_mapping)} slots of {plan.num_tokens} tokens")
    if any(row >= plan.num_tokens for row in plan.logits_rows):
        raise ValueError(f"{what}: logits_rows leave the {plan.num_tokens} tokens")
    if plan.num_heads % plan.num_kv_heads:
        raise ValueError(f"{what}: {plan.num_heads} heads over {plan.num_kv_heads} KV heads")


def _check_arg(recording: Recording, call: RecordedCall, arg: Arg, what: str) -> None:
    if isinstance(arg, (PlanArg, PlanArrayArg)) and arg.plan >= len(recording.plans):
        raise ValueError(f"{what}: there is no plan {arg.plan}")
    if isinstance(arg, SameArg) and not isinstance(call.args.get(arg.name), (ArrayArg, CachesArg)):
        raise ValueError(f"{what}: there is no {arg.name!r} that it could be")
    if isinstance(arg, LinearArg) and arg.row_types:
        rows = sum(part.rows for part in arg.row_types)
        if rows != arg.out_features:
            raise ValueError(f"{what}: row_types of {rows} rows, out_features={arg.out_features}")
    arrays = arg.arrays.values() if isinstance(arg, FieldsArg) else [arg]
    for array in arrays:
        if isinstance(array, ArrayArg):
            _check_array(array, what)


def _check_array(array: ArrayArg, what: str) -> None:
    size = 1
    for length in array.shape:
        size *= length
    if size > 2**40 or not 1 <= len(array.shape) <= 4:
        raise ValueError(f"{what}: {list(array.shape)} is no shape of an op's array")
    if array.values is not None and len(array.values) != size:
        raise ValueError(f"{what}: {len(array.values)} values in {list(array.shape)}")
    if array.values is not None and not _are_of(array.dtype, array.values):
        raise ValueError(f"{what}: its values are not all {array.dtype}")
    row = size // array.shape[0] if array.shape[0] else 0
    if array.row_stride is not None and not row <= array.row_stride <= 2**31 - 1:
        raise ValueError(f"{what}: rows of {row} elements, {array.row_stride} apart")


def _are_of(dtype: str, values: tuple[_Number, ...]) -> bool:
    """Whether numbers are of a type that an op's host arrays have."""
    if dtype == "float32":
        return all(abs(value) <= _LARGEST for value in values)
    low, high = _LIMITS.get(dtype, (1, 0))
    return all(isinstance(value, int) and low <= value <= high for value in values)
