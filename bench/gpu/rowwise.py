"""Times of the ops on activations, of the KV store and of sampling, at a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.attention_cases import BLOCK_SIZE
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target, fill
from bench.gpu.timing import Work, cold_copies, copy_bandwidth, summarize, time_device
from bench.roofline import Model
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.sampling import DeviceLogprobRows, DeviceSamplingRows, Sampling
from rawpaged.models.config import RopeConfig
from rawpaged.models.rope import rope_table
from tests.ops.sampling_suite import sampling_rows

_MOST_COPIES = 64
_MOST_LOGITS_ROWS = 64
_MAX_LEN = 4096
_TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    work: Work
    prepare: Callable[[int], list[Callable[[], object]]]
    """Calls over so many copies of the arrays."""


def time_row_ops(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Each op for each number of rows, its arrays not in the cache."""
    _, bandwidth = copy_bandwidth(target, sizes.copy_bytes, sizes.seconds)
    recorder.peaks["copy_gb_per_s"] = bandwidth / 1e9
    backend = CudaBackend(target.device, dtype="bfloat16")
    arrays = _Arrays(target, backend, sizes.model)
    for rows in sizes.row_counts:
        cases = list(_activation_cases(arrays, rows))
        if rows <= _MOST_LOGITS_ROWS:
            cases += _sampling_cases(arrays, rows)
        for case in cases:
            known = None if target.is_simulated else bandwidth
            run = partial(_measure, target, case, sizes.seconds, known)
            recorder.measure(f"row ops/{case.name}", {"rows": rows, "dtype": "bfloat16"}, run)
    backend.close()


def _measure(target: Target, case: _Case, seconds: float, known: float | None) -> Results:
    copies = min(_MOST_COPIES, cold_copies(target, case.work.num_bytes))
    timing = time_device(target, case.prepare(copies), seconds)
    return {**summarize(timing, case.work, known), "copies": copies}


class _Arrays:
    """Arrays of random numbers on the device."""

    def __init__(self, target: Target, backend: CudaBackend, model: Model) -> None:
        self.target, self.backend, self.model = target, backend, model
        self._values = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
        self.norm_weight = backend.upload(np.ones(model.hidden_size, np.float32))
        table = rope_table(RopeConfig(rope_theta=500000.0), model.head_dim, _MAX_LEN)
        self.cos_sin = backend.upload(table)

    def act(self, *shape: int) -> Any:
        return self._filled(shape, "bfloat16", self._values.astype(ml_dtypes.bfloat16))

    def floats(self, *shape: int) -> Any:
        return self._filled(shape, "float32", self._values)

    def positions(self, rows: int) -> Any:
        return self.backend.upload(np.arange(rows, dtype=np.int32) % _MAX_LEN)

    def _filled(self, shape: tuple[int, ...], dtype: str, values: Any) -> Any:
        array = self.target.device.empty(shape, dtype)
        fill(self.target, array, values)
        return array


def _activation_cases(arrays: _Arrays, rows: int) -> Iterator[_Case]:
    backend, model = arrays.backend, arrays.model
    hidden, inner = model.hidden_size, model.intermediate_size
    heads = model.num_heads + 2 * model.num_kv_heads

    def rms_norm(copies: int) -> list[Callable[[], object]]:
        out = backend.empty((rows, hidden), "bfloat16")
        weight = arrays.norm_weight
        residuals = [arrays.floats(rows, hidden) for _ in range(copies)]
        return [partial(backend.rms_norm, out, x, weight, 1e-5) for x in residuals]

    def add_rms_norm(copies: int) -> list[Callable[[], object]]:
        out = backend.empty((rows, hidden), "bfloat16")
        weight = arrays.norm_weight
        pairs = [(arrays.act(rows, hidden), arrays.floats(rows, hidden)) for _ in range(copies)]
        return [partial(backend.add_rms_norm, out, *pair, weight, 1e-5) for pair in pairs]

    def silu_and_mul(copies: int) -> list[Callable[[], object]]:
        out = backend.empty((rows, inner), "bfloat16")
        halves = [arrays.act(rows, 2 * inner) for _ in range(copies)]
        return [partial(backend.silu_and_mul, out, x) for x in halves]

    yield _Case("rms_norm", Work(rows * hidden * 6 + 4 * hidden), rms_norm)
    yield _Case("add_rms_norm", Work(rows * hidden * 12 + 4 * hidden), add_rms_norm)
    yield _Case("silu_and_mul", Work(rows * inner * 6), silu_and_mul)
    work = Work(rows * (4 * heads * model.head_dim + 4 * model.head_dim))
    yield _Case("rope_and_store_kv", work, partial(_rope_and_store_kv, arrays, rows))


def _rope_and_store_kv(arrays: _Arrays, rows: int, copies: int) -> list[Callable[[], object]]:
    """q and k rotated, keys and values stored."""
    backend, model = arrays.backend, arrays.model
    q_heads, kv_heads = model.num_heads, model.num_kv_heads
    blocks = -(-rows // BLOCK_SIZE)
    cache = backend.new_kv_cache(blocks * copies, kv_heads, model.head_dim, BLOCK_SIZE)
    positions = arrays.positions(rows)

    def call(qkv: Any, slots: Any) -> None:
        q, k, v = qkv[:, :q_heads], qkv[:, q_heads:-kv_heads], qkv[:, -kv_heads:]
        backend.rope_and_store_kv(cache, q, k, v, positions, arrays.cos_sin, slots)

    calls: list[Callable[[], object]] = []
    for copy in range(copies):
        qkv = arrays.act(rows, q_heads + 2 * kv_heads, model.head_dim)
        first = copy * blocks * BLOCK_SIZE
        slots = backend.upload(np.arange(first, first + rows, dtype=np.int64))
        calls.append(partial(call, qkv, slots))
    return calls


def _sampling_cases(arrays: _Arrays, rows: int) -> list[_Case]:
    """The kernels alone; bench/gpu/launch.py has the backend's call with its copies."""
    vocab_size = arrays.model.vocab_size
    op = Sampling(arrays.target.device.loader, vocab_size=vocab_size)
    upload, empty = arrays.target.device.upload, arrays.target.device.empty

    def draw(params: dict[str, Any], copies: int) -> list[Callable[[], object]]:
        host = sampling_rows(rows, **params)
        on_device = DeviceSamplingRows(*(upload(getattr(host, f.name)) for f in fields(host)))
        out = empty((rows,), "int32")
        logits = [arrays.floats(rows, vocab_size) for _ in range(copies)]
        return [partial(op.sample, out, each, on_device) for each in logits]

    def logprobs(copies: int) -> list[Callable[[], object]]:
        top = (rows, _TOP_LOGPROBS)
        out = DeviceLogprobRows(
            empty((rows,), "float32"),
            empty((rows,), "int32"),
            empty(top, "int32"),
            empty(top, "float32"),
        )
        ids = upload(np.arange(rows, dtype=np.int32))
        logits = [arrays.floats(rows, vocab_size) for _ in range(copies)]
        return [partial(op.token_logprobs, out, each, ids) for each in logits]

    work = Work(4 * rows * vocab_size)
    top = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    return [
        _Case("sample/greedy", work, partial(draw, {"temperature": 0.0})),
        _Case("sample/temperature", work, partial(draw, {"temperature": 0.8})),
        _Case("sample/top_k_top_p", work, partial(draw, top)),
        _Case(f"logprobs/top_{_TOP_LOGPROBS}", work, logprobs),
    ]
