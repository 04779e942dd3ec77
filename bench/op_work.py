"""What a recorded call has to move and compute at least, once its arguments are known to fit.

Kernels follow indices without asking. So everything that a kernel takes for granted is checked
here: a recording may come from anybody. Bytes and products are counted as in op_cases.py, but
activations have the type that the backend gives them.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping

from bench.gpu.timing import Work
from bench.recorded_call import CallView, visible_keys
from rawpaged.backend import Backend
from rawpaged.engine.op_recording import (
    ArrayArg,
    CacheArg,
    CachesArg,
    FieldsArg,
    LinearArg,
    NumberArg,
    PlanArg,
    PlanArrayArg,
)
from rawpaged.errors import RecordingError

_MOST_TOP_LOGPROBS = 256
_MOST_LAYERS = 1024


def work_of(view: CallView) -> Work:
    """Least bytes and products of a call. Raises RecordingError unless its arguments fit."""
    work = _WORK.get(view.call.op)
    if work is None:
        known = ", ".join(_WORK)
        raise RecordingError(f"no op is called {view.call.op!r}; there are {known}")
    wanted = set(inspect.signature(getattr(Backend, view.call.op)).parameters) - {"self"}
    view.need(view.call.args.keys() == wanted, f"its arguments are not {sorted(wanted)}")
    return work(view)


def _embed(view: CallView) -> Work:
    rows, hidden = view.shape("out", 2)
    table = view.arg("table", LinearArg)
    view.need(table.in_features == hidden, f"rows of {table.in_features} to rows of {hidden}")
    view.need(view.index_count("token_ids") == rows, f"not {rows} token_ids")
    row_bytes = view.weight_bytes("table") // table.out_features
    return Work(rows * (row_bytes + 4 * hidden))


def _rms_norm(view: CallView) -> Work:
    x = view.arg("x", ArrayArg).shape
    view.need(view.arg("out", ArrayArg).shape == x and len(x) in (2, 3), "out is not like x")
    view.need(view.shape("weight", 1) == x[-1:], f"weight is not f32[{x[-1]}]")
    view.number("eps", 0, 1)
    moved = math.prod(x) * (view.float_bytes("x") + view.activation_bytes) + 4 * x[-1]
    return Work(moved, 4 * math.prod(x))


def _add_rms_norm(view: CallView) -> Work:
    rows, size = view.shape("x", 2)
    view.need(view.shape("out", 2) == view.shape("residual", 2) == (rows, size), "shapes differ")
    view.need(view.shape("weight", 1) == (size,), f"weight is not f32[{size}]")
    view.number("eps", 0, 1)
    return Work(rows * size * (8 + 2 * view.activation_bytes) + 4 * size, 5 * rows * size)


def _linear(view: CallView) -> Work:
    rows, columns = view.shape("x", 2)
    weight = view.arg("weight", LinearArg)
    inputs, outputs = weight.in_features, weight.out_features
    view.need(columns == inputs, f"x has {columns} columns of {inputs}")
    view.need(view.shape("out", 2) == (rows, outputs), f"out is not [{rows}, {outputs}]")
    moved = view.weight_bytes("weight") + view.activation_bytes * rows * inputs
    return Work(moved + view.float_bytes("out") * rows * outputs, 2 * rows * inputs * outputs)


def _rope_and_store_kv(view: CallView) -> Work:
    rows, heads, size = view.shape("q", 3)
    cache = view.arg("cache", CacheArg)
    kv = (rows, cache.num_kv_heads, cache.head_dim)
    view.need(view.shape("k", 3) == view.shape("v", 3) == kv and size == cache.head_dim, "k and v")
    table_rows, columns = view.shape("cos_sin", 2)
    view.need(columns == size and size % 2 == 0, f"cos_sin of {columns} for heads of {size}")
    at, slots = view.plan_array("positions"), view.plan_array("slot_mapping")
    view.need(len(at) == len(slots) == rows, f"positions and slots are not those of {rows} tokens")
    view.need(max(at, default=0) < table_rows, f"a position is not one of {table_rows}")
    most = cache.num_blocks * cache.block_size
    view.need(max(slots, default=0) < most, f"a slot is not one of {most}")
    kv_bytes = rows * view.kv_bytes(cache) // cache.block_size
    moved = rows * (2 * heads + 2 * cache.num_kv_heads) * size * view.activation_bytes
    flops = 3 * rows * (heads + cache.num_kv_heads) * size
    return Work(moved + kv_bytes + 4 * rows * size, flops)


def _copy_blocks(view: CallView) -> Work:
    targets, sources = view.arg("targets", CachesArg), view.arg("sources", CachesArg)
    count, two = view.shape("pairs", 2)
    pairs = view.arg("pairs", ArrayArg).values
    view.need(two == 2 and pairs is not None, "pairs are not i64[n, 2] with their values")
    view.need(targets.num_layers == sources.num_layers <= _MOST_LAYERS, "layers")
    to, origin = targets.cache, sources.cache
    view.need(
        (to.num_kv_heads, to.head_dim, to.block_size)
        == (origin.num_kv_heads, origin.head_dim, origin.block_size),
        "blocks of targets and sources differ",
    )
    return Work(2 * count * targets.num_layers * view.kv_bytes(to))


def _paged_attention(view: CallView) -> Work:
    rows, heads, size = view.shape("q", 3)
    cache = view.arg("cache", CacheArg)
    plan = view.recording.plans[view.arg("plan", PlanArg).plan]
    view.need(view.shape("out", 3) == (rows, heads, size), "out is not like q")
    view.need(rows == plan.num_tokens and heads == plan.num_heads, "q is not the plan's")
    kv = (plan.num_kv_heads, size)
    view.need((cache.num_kv_heads, cache.head_dim) == kv, "the cache is not the plan's")
    for table, length in zip(plan.block_tables, plan.seq_lens, strict=True):
        blocks = len(table)
        view.need(length <= blocks * cache.block_size, f"{length} keys in {blocks} blocks")
        view.need(max(table, default=0) < cache.num_blocks, "a block is not in the pool")
    view.number("scale", -1e6, 1e6)
    window = view.arg("sliding_window", NumberArg).value
    view.need(window is None or (isinstance(window, int) and window > 0), f"window {window}")
    read, pairs = visible_keys(plan, None if window is None else int(window))
    kv_bytes = read * view.kv_bytes(cache) // cache.block_size
    activations = 2 * rows * heads * size * view.activation_bytes
    return Work(kv_bytes + activations, 4 * heads * size * pairs)


def _silu_and_mul(view: CallView) -> Work:
    rows, size = view.shape("out", 2)
    view.need(view.shape("gate_up", 2) == (rows, 2 * size), "gate_up is not twice as wide as out")
    return Work(3 * rows * size * view.activation_bytes, 4 * rows * size)


def _gather_rows(view: CallView) -> Work:
    rows, size = view.shape("out", 2)
    all_rows, columns = view.shape("x", 2)
    view.need(columns == size, f"rows of {columns} to rows of {size}")
    is_plans = isinstance(view.call.args.get("rows"), PlanArrayArg)
    picked = view.plan_array("rows") if is_plans else view.arg("rows", ArrayArg).values
    view.need(picked is not None and len(picked) == rows, f"not {rows} rows are picked")
    view.need(all(0 <= row < all_rows for row in picked or ()), f"a row is not one of {all_rows}")
    return Work(2 * rows * size * view.activation_bytes)


def _edit_logits(view: CallView) -> Work:
    rows, vocab_size = view.shape("logits", 2)
    edits = _fields(view, "edits", "LogitEdits")
    count = edits["rows"].shape[0]
    for name in ("rows", "token_ids", "bias", "seen", "counts"):
        view.need(edits[name].shape == (count,), f"{name} is not of {count} edits")
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        view.need(edits[name].shape == (rows,), f"{name} is not of {rows} rows")
    values = edits["rows"].values or ()
    view.need(all(0 <= row < rows for row in values), f"a row is not one of {rows}")
    most = max(Counter(values).values(), default=0)
    view.need(most <= vocab_size, "more edits of a row than tokens")
    # The logit read and written; row, token, bias and count of four bytes; the flag of one.
    return Work(count * (8 + 16 + 1), 5 * count)


def _sample(view: CallView) -> Work:
    rows, vocab_size = view.shape("logits", 2)
    for name, array in _fields(view, "rows", "SamplingRows").items():
        view.need(array.shape == (rows,), f"{name} is not of {rows} rows")
    return Work(4 * rows * vocab_size)


def _token_logprobs(view: CallView) -> Work:
    rows, vocab_size = view.shape("logits", 2)
    view.need(view.shape("token_ids", 1) == (rows,), f"not {rows} token_ids")
    view.number("k", 0, min(vocab_size, _MOST_TOP_LOGPROBS))
    return Work(4 * rows * vocab_size)


def _fields(view: CallView, name: str, kind: str) -> Mapping[str, ArrayArg]:
    arg = view.arg(name, FieldsArg)
    wanted = _FIELDS[kind]
    view.need(arg.type == kind and arg.arrays.keys() == wanted, f"{name} is no {kind}")
    for field, array in arg.arrays.items():
        view.need(len(array.shape) == 1, f"{field} is no vector")
        view.need(field == "token_ids" or array.values is not None, f"{field} has no values")
    return arg.arrays


_FIELDS = {
    "LogitEdits": {
        *("rows", "token_ids", "bias", "seen", "counts"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    },
    "SamplingRows": {
        *("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "sample_indices"),
    },
}

_WORK: Mapping[str, Callable[[CallView], Work]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "linear": _linear,
    "rope_and_store_kv": _rope_and_store_kv,
    "copy_blocks": _copy_blocks,
    "paged_attention": _paged_attention,
    "silu_and_mul": _silu_and_mul,
    "gather_rows": _gather_rows,
    "edit_logits": _edit_logits,
    "sample": _sample,
    "token_logprobs": _token_logprobs,
}
