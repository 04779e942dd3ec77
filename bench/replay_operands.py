"""Operands for recorded calls: random numbers of the recorded shapes, around recorded indices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.recorded_call import CallView, positions, used_blocks
from bench.replay_arrays import (
    Rows,
    fill_cache,
    new_array,
    new_cache,
    normal,
    pack_rows,
    random_rows,
    rotations,
)
from rawpaged.backend import Backend, BatchMeta, KVCache, LogitEdits, SamplingRows
from rawpaged.engine.op_recording import (
    ArrayArg,
    CacheArg,
    CachesArg,
    FieldsArg,
    LinearArg,
    NumberArg,
    PlanArg,
    PlanArrayArg,
    RecordedPlan,
    SameArg,
)
from rawpaged.errors import RecordingError

_HOST_INDICES = {("copy_blocks", "pairs"), ("token_logprobs", "token_ids")}
_FIELD_DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("rows", "token_ids", "counts", "top_k"), "int32"),
    **dict.fromkeys(("positions", "sample_indices"), "uint32"),
    "seeds": "uint64",
    "seen": "bool",
}
"""Of LogitEdits and SamplingRows; others are float32."""


class Operands:
    """Makes what a recorded call takes; `work_of` has found that it fits.

    The same seed gives the same numbers on every backend: floats have bfloat16's values.
    """

    def __init__(self, view: CallView, seed: int) -> None:
        self._view = view
        self._backend = view.backend
        self._seed = seed
        self._weights: dict[str, list[Rows]] = {}
        self._table: Any = None

    def shared(self) -> dict[str, Any]:
        """Arguments but for those that `stored` makes: activations, indices, numbers."""
        rng = np.random.default_rng(self._seed)
        made = {
            name: self._make(name, arg, rng)
            for name, arg in self._view.call.args.items()
            if not isinstance(arg, (LinearArg, CacheArg, CachesArg, PlanArg, SameArg))
        }
        for name, arg in self._view.call.args.items():
            if isinstance(arg, SameArg) and arg.name in made:
                made[name] = made[arg.name]
        return made

    def stored(self, copy: int) -> dict[str, Any]:
        """What lies in memory between steps: weights and KV.

        Each copy has its own, but the embedding's table, of which copies take other rows. The
        plan comes with the cache, which backends want to know first.
        """
        rng = np.random.default_rng((self._seed, copy))
        args, made = self._view.call.args, dict[str, Any]()
        for name, arg in args.items():
            if isinstance(arg, LinearArg):
                made[name] = self._linear(name, arg)
            elif isinstance(arg, CacheArg):
                made[name] = self._cache(arg, name, rng)
            elif isinstance(arg, CachesArg):
                made[name] = self._caches(arg, name)
            elif isinstance(arg, SameArg) and isinstance(args[arg.name], CachesArg):
                made[name] = made[arg.name]
        for name, arg in args.items():
            if isinstance(arg, PlanArg):
                plan = self._view.recording.plans[arg.plan]
                made[name] = make_plan(self._backend, plan)
            elif name == "token_ids" and isinstance(args.get("table"), LinearArg):
                made[name] = self._backend.upload(self._token_ids(rng))
        return made

    def _make(self, name: str, arg: object, rng: np.random.Generator) -> Any:
        op = self._view.call.op
        if isinstance(arg, NumberArg):
            return arg.value
        if isinstance(arg, FieldsArg):
            return self._fields(arg, rng)
        if isinstance(arg, PlanArrayArg):
            dtype = np.int64 if arg.name == "slot_mapping" else np.int32
            return self._backend.upload(np.array(self._view.plan_array(name), dtype))
        assert isinstance(arg, ArrayArg), f"{name}: {arg}"
        if name == "cos_sin":
            return self._backend.upload(rotations(arg.shape, rng))
        if (op, name) == ("token_logprobs", "token_ids"):
            vocab_size = self._view.shape("logits", 2)[1]
            return rng.integers(0, vocab_size, arg.shape, np.int32)
        if (op, name) == ("embed", "token_ids"):
            return None
        if arg.values is not None:
            values = _typed(arg, "int64" if name == "pairs" else "int32")
            return values if (op, name) in _HOST_INDICES else self._backend.upload(values)
        return self._floats(name, arg, rng)

    def _floats(self, name: str, arg: ArrayArg, rng: np.random.Generator) -> Any:
        """Standard normal numbers; rows lie as far from each other as the recorded ones."""
        view, dtype = self._view, self._view.float_dtype(name)
        rows, *row = arg.shape
        size = int(np.prod(row))
        stride = arg.row_stride or size
        if not row or stride == size:
            return new_array(self._backend, normal(arg.shape, rng), dtype)
        view.need(stride % row[-1] == 0, f"{name}: rows of {row} lie {stride} apart")
        base = new_array(self._backend, normal((rows, stride), rng), dtype)
        if len(row) == 1:
            return base[:, : row[0]]
        return base.reshape((rows, stride // row[-1], row[-1]))[:, : row[0]]

    def _linear(self, name: str, arg: LinearArg) -> Any:
        """The same numbers in every copy, small as a model's are."""
        if self._table is not None:
            return self._table
        if name not in self._weights:
            rng = np.random.default_rng((self._seed, len(name)))
            self._weights[name] = random_rows(self._backend, arg, rng)
        packed = pack_rows(self._backend, self._weights[name])
        if name == "table":
            self._table = packed
        return packed

    def _cache(self, arg: CacheArg, name: str, rng: np.random.Generator) -> KVCache:
        num_blocks = used_blocks(self._view, name)
        shape = (num_blocks, arg.num_kv_heads, arg.head_dim, arg.block_size)
        cache = new_cache(self._backend, *shape)
        fill_cache(self._backend, cache, shape, rng)
        return cache

    def _caches(self, arg: CachesArg, name: str) -> list[KVCache]:
        """Their contents are what the backend leaves there: copies take as long whatever it is."""
        cache, backend = arg.cache, self._backend
        new = partial(new_cache, backend) if arg.memory == "device" else backend.new_host_kv_cache
        num_blocks = used_blocks(self._view, name)
        shape = (num_blocks, cache.num_kv_heads, cache.head_dim, cache.block_size)
        return [new(*shape) for _ in range(arg.num_layers)]

    def _fields(self, arg: FieldsArg, rng: np.random.Generator) -> LogitEdits | SamplingRows:
        arrays = {
            name: _typed(array, _FIELD_DTYPES.get(name, "float32"))
            for name, array in arg.arrays.items()
            if array.values is not None
        }
        if arg.type == "SamplingRows":
            return SamplingRows(**arrays)
        vocab_size = self._view.shape("logits", 2)[1]
        # A factor would take the logits out of range over many calls.
        arrays["repetition_penalty"] = np.ones_like(arrays["repetition_penalty"])
        arrays["token_ids"] = tokens_of_rows(arrays["rows"], vocab_size, rng)
        return LogitEdits(**arrays)

    def _token_ids(self, rng: np.random.Generator) -> npt.NDArray[np.int32]:
        table = self._view.arg("table", LinearArg)
        count = self._view.index_count("token_ids")
        return rng.integers(0, table.out_features, count, np.int32)


def calls_of(view: CallView, copies: int, seed: int) -> list[partial[Any]]:
    """The call, over as many copies of what has to come from memory."""
    operands = Operands(view, seed)
    shared = operands.shared()
    op = getattr(view.backend, view.call.op)
    return [partial(op, **{**shared, **operands.stored(copy)}) for copy in range(copies)]


def make_plan(backend: Backend, plan: RecordedPlan) -> Any:
    """The backend's plan of a batch whose tokens are all 0."""
    width = max(1, *map(len, plan.block_tables))
    tables = np.zeros((len(plan.block_tables), width), np.int32)
    for row, table in enumerate(plan.block_tables):
        tables[row, : len(table)] = table
    meta = BatchMeta(
        token_ids=np.zeros(plan.num_tokens, np.int32),
        positions=np.array(positions(plan), np.int32),
        slot_mapping=np.array(plan.slot_mapping, np.int64),
        query_start_loc=np.array(plan.query_start_loc, np.int32),
        seq_lens=np.array(plan.seq_lens, np.int32),
        block_tables=tables,
        logits_rows=np.array(plan.logits_rows, np.int32),
        num_prompt_tokens=(
            None if plan.num_prompt_tokens is None else np.array(plan.num_prompt_tokens, np.int32)
        ),
    )
    return backend.plan(meta, num_heads=plan.num_heads, num_kv_heads=plan.num_kv_heads)


def _typed(arg: ArrayArg, dtype: str) -> npt.NDArray[Any]:
    try:
        return np.array(arg.values, dtype).reshape(arg.shape)
    except (OverflowError, ValueError) as error:
        raise RecordingError(f"values are no {dtype}{list(arg.shape)}: {error}") from error


def tokens_of_rows(
    rows: npt.NDArray[np.int32], vocab_size: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """A token for each edit, none twice in a row."""
    tokens = np.empty(len(rows), np.int32)
    order = np.argsort(rows, kind="stable")
    _, starts = np.unique(rows[order], return_index=True)
    for start, end in itertools.pairwise([*starts.tolist(), len(rows)]):
        tokens[order[start:end]] = rng.choice(vocab_size, end - start, replace=False)
    return tokens
