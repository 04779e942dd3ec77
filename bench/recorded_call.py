"""A recorded call of an op, asked for its arguments as a backend would take them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from rawpaged.backend import Backend
from rawpaged.engine.op_recording import (
    ArrayArg,
    CacheArg,
    CachesArg,
    LinearArg,
    NumberArg,
    PlanArg,
    PlanArrayArg,
    RecordedCall,
    RecordedPlan,
    Recording,
    RowsArg,
    SameArg,
)
from rawpaged.errors import RecordingError

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_ACTIVATIONS: Mapping[str, frozenset[str]] = {
    "rms_norm": frozenset({"out"}),
    "add_rms_norm": frozenset({"out", "x"}),
    "linear": frozenset({"out", "x"}),
    "rope_and_store_kv": frozenset({"q", "k", "v"}),
    "paged_attention": frozenset({"out", "q"}),
    "silu_and_mul": frozenset({"out", "gate_up"}),
    "gather_rows": frozenset({"out", "x"}),
}
"""Arguments that have the backend's type of activations; other floats are float32."""

_ArgT = TypeVar("_ArgT")


@dataclass(frozen=True, slots=True)
class CallView:
    """A recorded call, asked for its arguments. Raises RecordingError for what does not fit."""

    recording: Recording
    call: RecordedCall
    backend: Backend

    def need(self, condition: bool, what: str) -> None:
        if not condition:
            raise RecordingError(f"{self.label}: {what}")

    def arg(self, name: str, kind: type[_ArgT]) -> _ArgT:
        """The argument `name`, which has to be of a kind; one that is another is that one."""
        found = self.call.args.get(name)
        if isinstance(found, SameArg):
            found = self.call.args.get(found.name)
        if not isinstance(found, kind):
            raise RecordingError(f"{self.call.op}: {name} is no {kind.__name__}, but {found!r}")
        return found

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        shape = self.arg(name, ArrayArg).shape
        self.need(len(shape) == axes, f"{name} has not {axes} axes: {list(shape)}")
        return shape

    def index_count(self, name: str) -> int:
        """Length of a vector of indices, of a plan or for itself."""
        if isinstance(self.call.args.get(name), PlanArrayArg):
            return len(self.plan_array(name))
        return self.shape(name, 1)[0]

    def plan_array(self, name: str) -> tuple[int, ...]:
        """The numbers of a plan's array; of token ids, which are not there, as many zeros."""
        arg = self.arg(name, PlanArrayArg)
        plan = self.recording.plans[arg.plan]
        if arg.name == "token_ids":
            return (0,) * plan.num_tokens
        if arg.name == "positions":
            return positions(plan)
        self.need(arg.name in ("slot_mapping", "logits_rows"), f"{name} is the plan's {arg.name}")
        return plan.slot_mapping if arg.name == "slot_mapping" else plan.logits_rows

    def number(self, name: str, low: float, high: float) -> float:
        value = self.arg(name, NumberArg).value
        if value is None or not low <= value <= high:
            raise RecordingError(f"{self.call.op}: {name}={value} is not in [{low}, {high}]")
        return value

    @property
    def label(self) -> str:
        """The op and its sizes, as traces name them."""
        return f"{self.call.op} {'x'.join(map(str, _dims(self.call)))}".rstrip()

    @property
    def activation_bytes(self) -> int:
        return ITEM_BYTES[self.backend.activation_dtype]

    def weight_bytes(self, name: str) -> int:
        """Of a weight as the backend stores it: in blocks, where it has these, else as floats."""
        weight = self.arg(name, LinearArg)
        floats = 8 * ITEM_BYTES[self.backend.dtype]
        parts = weight.row_types or (RowsArg(None, weight.out_features),)
        block_bits = self.backend.block_bits
        row_bits = [(part.rows, block_bits.get(part.type or "", floats)) for part in parts]
        return int(sum(rows * bits for rows, bits in row_bits) * weight.in_features / 8)

    def kv_bytes(self, cache: CacheArg) -> int:
        """Of one block in one layer."""
        return self.backend.kv_bytes_per_block(cache.num_kv_heads, cache.head_dim, cache.block_size)

    def float_bytes(self, name: str) -> int:
        """Of an element of an array of floats."""
        return ITEM_BYTES[self.float_dtype(name)]

    def float_dtype(self, name: str) -> str:
        """Of an array of floats on this backend, whatever the recording's had."""
        array = self.arg(name, ArrayArg)
        op, wide = self.call.op, self.recording.about.activation_dtype != array.dtype
        if op == "rms_norm" and name == "x":
            # The residual stream is float32; heads in an activation are normalised too.
            return self.backend.activation_dtype if len(array.shape) == 3 else "float32"
        if name not in _ACTIVATIONS.get(op, ()) or wide or self._makes_logits(name):
            return "float32"
        return self.backend.activation_dtype

    def _makes_logits(self, name: str) -> bool:
        """Whether a product is as wide as logits; where activations are float32 that tells them."""
        weight = self.call.args.get("weight")
        if name != "out" or not isinstance(weight, LinearArg):
            return False
        logits = (call.args.get("logits") for call in self.recording.calls)
        widths = {array.shape[-1] for array in logits if isinstance(array, ArrayArg)}
        return weight.out_features in widths


def positions(plan: RecordedPlan) -> tuple[int, ...]:
    """Of each token in its request: those of a request are its last."""
    starts = plan.query_start_loc
    return tuple(
        position
        for (start, end), length in zip(itertools.pairwise(starts), plan.seq_lens, strict=True)
        for position in range(length - (end - start), length)
    )


def visible_keys(plan: RecordedPlan, window: int | None) -> tuple[int, int]:
    """(keys that have to be read, pairs of a query and a key that it sees) of a KV head."""
    read = pairs = 0
    for (start, end), length in zip(
        itertools.pairwise(plan.query_start_loc), plan.seq_lens, strict=True
    ):
        first = length - (end - start)
        seen = [min(position + 1, window or length) for position in range(first, length)]
        pairs += sum(seen)
        read += length - (first + 1 - seen[0])
    return read, pairs


def used_blocks(view: CallView, name: str) -> int:
    """Blocks that a pool needs for this call: up to the highest that it names."""
    call, recording = view.call, view.recording
    if call.op == "copy_blocks":
        pairs = view.arg("pairs", ArrayArg).values or ()
        return 1 + int(max(pairs, default=0))
    cache = view.arg(name, CacheArg)
    if call.op == "paged_attention":
        plan = recording.plans[view.arg("plan", PlanArg).plan]
        return 1 + max(max(table, default=0) for table in plan.block_tables)
    return 1 + max(0, *view.plan_array("slot_mapping"), 0) // cache.block_size


def _dims(call: RecordedCall) -> tuple[int, ...]:
    weight, first = call.args.get("weight"), None
    for name in ("q", "x", "logits", "out", "pairs"):
        first = call.args.get(name)
        if isinstance(first, ArrayArg):
            break
    shape = first.shape if isinstance(first, ArrayArg) else ()
    return (*shape, weight.out_features) if isinstance(weight, LinearArg) else shape


def operand_bytes(view: CallView) -> tuple[int, int]:
    """Memory that a call's arguments take: activations and indices, and what each copy has."""
    shared = stored = 0
    for name, arg in view.call.args.items():
        if isinstance(arg, ArrayArg):
            rows = arg.shape[0]
            shared += 8 * max(rows * (arg.row_stride or 0), math.prod(arg.shape))
        elif isinstance(arg, LinearArg):
            size = view.weight_bytes(name) + 8 * arg.out_features
            stored += size if name == "weight" else 0
            # As drawn on the host; and the embedding's table, of which there is one.
            shared += 4 * arg.out_features * arg.in_features + (0 if name == "weight" else size)
        elif isinstance(arg, CacheArg):
            stored += used_blocks(view, name) * view.kv_bytes(arg)
        elif isinstance(arg, CachesArg):
            stored += arg.num_layers * used_blocks(view, name) * view.kv_bytes(arg.cache)
    return shared, stored
