"""The CUDA backend's ops on a device against float64, on the cases that all backends share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.recorder import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target
from rawpaged.backend import SamplingRows, TokenLogprobRows
from rawpaged.cpu.backend import CpuBackend
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.block_copy import CopyBlocks
from rawpaged.gpu.device import numpy_dtype
from rawpaged.gpu.linear import PackedLinear
from rawpaged.gpu.logit_edits import MaskLogits
from tests.ops import row_cases
from tests.ops.cases import LINEAR_SHAPES
from tests.ops.sampling_suite import SamplingSuite, sampling_rows

Array = npt.NDArray[Any]

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
_LARGE_SHAPES = (
    # rows, in_features, out_features: each tile of gpu/tuned.py, split over K or not
    (1, 4096, 1024),
    (3, 4096, 100),
    (8, 14336, 128),
    (16, 4096, 200),
    (32, 4096, 514),
    (33, 4096, 514),
    (64, 4096, 600),
    (130, 4096, 1030),
    (300, 1096, 2050),
)
_SMALL_SHAPES = ((40, 168, 70), (70, 128, 34))
_VOCAB_SIZE = 128256
_SMALL_VOCAB_SIZE = 1031


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """A backend, and arrays of its activations' type in and out."""

    target: Target
    backend: CudaBackend

    @property
    def dtype(self) -> str:
        return self.backend.dtype

    def act(self, x: Array) -> Any:
        """x rounded to the type of activations, on the device."""
        return self.target.device.upload(x.astype(numpy_dtype(self.dtype)))

    def rounded(self, x: row_cases.Float32) -> row_cases.Float32:
        return row_cases.stored(x, self.dtype)

    def poisoned(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """Memory full of NaN."""
        full = np.full(shape, np.nan, numpy_dtype(dtype or self.dtype))
        return self.target.device.upload(full)

    def host(self, array: Any) -> npt.NDArray[np.float64]:
        return self.backend.download(array).astype(np.float64)

    def assert_rounded(self, out: Any, expected: Array, atol: float = 1e-5) -> None:
        """Whether out is expected with one rounding, after a float32 computation."""
        rtol = 1.01 * UNIT_ROUNDOFF[self.dtype]
        np.testing.assert_allclose(self.host(out), expected, rtol=rtol, atol=atol)


def each_dtype(target: Target, sizes: Sizes) -> Iterator[DeviceOps]:
    """A backend of each type; it is closed when the next is asked for."""
    for dtype in ("bfloat16", "float16") if sizes.checks_all else ("bfloat16",):
        backend = CudaBackend(target.device, dtype=dtype)
        yield DeviceOps(target, backend)
        backend.close()


def check_rows(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """The row-wise ops."""
    norm_sizes = (*row_cases.NORM_SIZES, 4096) if sizes.checks_all else (7, 64)
    for ops in each_dtype(target, sizes):
        cases: list[tuple[str, Callable[[DeviceOps], None]]] = [
            *((f"rms_norm/{size}", partial(_rms_norm, size=size)) for size in norm_sizes),
            ("rms_norm/heads", _head_norm),
            ("add_rms_norm", _add_norm),
            ("embed", _embed),
            ("rope_and_store_kv", _rope_and_store_kv),
            ("silu_and_mul", _silu_and_mul),
            ("gather_rows", _gather_rows),
            ("edit_logits", _edit_logits),
            ("mask_logits", _mask_logits),
            ("copy_blocks", _copy_blocks),
            ("copy_blocks/pools", _copy_between_pools),
        ]
        for name, run in cases:
            recorder.check(name, {"dtype": ops.dtype}, partial(run, ops))


def check_linear(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Products of every tile, and that a row's bits do not depend on the batch."""
    known = [shape for shape in LINEAR_SHAPES if shape[1] % 8 == 0]
    shapes = (*known, *_LARGE_SHAPES) if sizes.checks_all else _SMALL_SHAPES
    for ops in each_dtype(target, sizes):
        for shape in shapes:
            for out_dtype in (ops.dtype, "float32"):
                parameters = {"dtype": ops.dtype, "out_dtype": out_dtype, "shape": shape}
                run = partial(_linear, ops, shape, out_dtype)
                recorder.check("linear", parameters, run)
        shape = (300, 4096, 514) if sizes.checks_all else (70, 600, 34)
        parameters = {"dtype": ops.dtype, "shape": shape}
        recorder.check("linear/bits", parameters, partial(_bits_of_rows, ops, shape))


def check_sampling(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """The suite of all samplers, and the CPU's ids exactly."""
    backend = CudaBackend(target.device, dtype="bfloat16")
    ops = DeviceOps(target, backend)
    suite = SamplingSuite()
    if not sizes.checks_all:
        suite.draws = 200
    for name, run in _suite_cases(suite, _DeviceSampler(backend), sizes.checks_all):
        recorder.check(f"sampling/{name}", {}, run)
    vocab_size = _VOCAB_SIZE if sizes.checks_all else _SMALL_VOCAB_SIZE
    run = partial(_ids_of_the_cpu, ops, vocab_size)
    recorder.check("sampling/ids of the CPU", {"vocab_size": vocab_size}, run)
    backend.close()


def _rms_norm(ops: DeviceOps, size: int) -> None:
    case = row_cases.norm_case(size)
    out = ops.poisoned(case.x.shape)
    upload = ops.backend.upload
    ops.backend.rms_norm(out, upload(case.x), upload(case.weight), case.eps)
    ops.assert_rounded(out, case.expected)


def _head_norm(ops: DeviceOps) -> None:
    case = row_cases.head_norm_case(64, ops.rounded)
    x = ops.act(case.x)
    heads = x[:, 1:4]
    ops.backend.rms_norm(heads, heads, ops.backend.upload(case.weight), case.eps)
    ops.assert_rounded(x, case.expected)


def _add_norm(ops: DeviceOps) -> None:
    case = row_cases.add_norm_case(576, 70, ops.rounded)
    out, total = ops.poisoned(case.x.shape), ops.backend.upload(case.residual)
    weight = ops.backend.upload(case.weight)
    ops.backend.add_rms_norm(out, ops.act(case.x), total, weight, case.eps)
    np.testing.assert_array_equal(ops.backend.download(total), case.x + case.residual)
    ops.assert_rounded(out, case.expected)


def _embed(ops: DeviceOps) -> None:
    case = row_cases.embed_case()
    table = ops.backend.pack_linear(case.table, None)
    out = ops.poisoned((len(case.token_ids), case.table.shape[1]), "float32")
    ops.backend.embed(out, ops.backend.upload(case.token_ids), table)
    np.testing.assert_array_equal(ops.host(out), ops.rounded(case.table)[case.token_ids])


def _rope_and_store_kv(ops: DeviceOps) -> None:
    """Two query heads in place, one of keys to the cache as rotated, one of values as it is."""
    case = row_cases.rope_case(ops.rounded, 128)
    backend, upload = ops.backend, ops.backend.upload
    x, cache = ops.act(case.x), backend.new_kv_cache(2, 1, 128, 16)
    slots = np.array([3, -1, 31, 16], np.int64)
    angles = (upload(case.positions), upload(case.cos_sin))
    backend.rope_and_store_kv(cache, x[:, :2], x[:, 2:3], x[:, 3:4], *angles, upload(slots))
    ops.assert_rounded(x[:, :2], case.expected[:, :2])
    np.testing.assert_array_equal(ops.host(x[:, 2:]), case.x[:, 2:])
    kept = slots >= 0
    keys, values = (
        ops.host(pool).reshape(32, 128)[slots[kept]] for pool in (cache.keys, cache.values)
    )
    rtol = 1.01 * UNIT_ROUNDOFF[ops.dtype]
    np.testing.assert_allclose(keys, case.expected[kept, 2], rtol=rtol, atol=1e-5)
    np.testing.assert_array_equal(values, case.x[kept, 3])


def _silu_and_mul(ops: DeviceOps) -> None:
    case = row_cases.silu_case(ops.rounded)
    out = ops.poisoned(case.expected.shape)
    ops.backend.silu_and_mul(out, ops.act(case.gate_up))
    ops.assert_rounded(out, case.expected)


def _gather_rows(ops: DeviceOps) -> None:
    case = row_cases.gather_case()
    rows = ops.backend.upload(case.rows)
    for x in (ops.act(case.x), ops.backend.upload(case.x)):
        out = ops.poisoned((len(case.rows), case.x.shape[1]), x.dtype.name)
        ops.backend.gather_rows(out, x, rows)
        np.testing.assert_array_equal(ops.host(out), ops.host(x)[case.rows])


def _edit_logits(ops: DeviceOps) -> None:
    case = row_cases.edit_case()
    logits = ops.backend.upload(case.logits)
    ops.backend.edit_logits(logits, case.edits)
    np.testing.assert_allclose(ops.host(logits), case.expected, rtol=1e-6)


def _mask_logits(ops: DeviceOps) -> None:
    rng = np.random.default_rng(0)
    logits = row_cases.normal(rng, 3, 100)
    words = rng.integers(-(2**31), 2**31, (2, 4), dtype=np.int32)
    rows = np.array([2, 0], np.int32)
    upload = ops.target.device.upload
    on_device = upload(logits)
    MaskLogits(ops.target.device)(on_device, upload(words), upload(rows))
    tokens = np.arange(100)
    allowed = (words[:, tokens // 32] >> (tokens % 32)) & 1
    logits[rows] = np.where(allowed, logits[rows], -np.inf)
    np.testing.assert_array_equal(ops.host(on_device), logits)


def _copy_blocks(ops: DeviceOps) -> None:
    rng = np.random.default_rng(0)
    pools = [ops.rounded(row_cases.normal(rng, 5, 2, 8, 16)) for _ in range(2)]
    on_device = [ops.act(pool) for pool in pools]
    pairs = np.array([[0, 3], [4, 1]], np.int64)
    copy_blocks = CopyBlocks(ops.target.device)
    copy_blocks(on_device, on_device, ops.target.device.upload(pairs))
    for pool, copied in zip(pools, on_device, strict=True):
        pool[pairs[:, 1]] = pool[pairs[:, 0]]
        np.testing.assert_array_equal(ops.host(copied), pool)


def _copy_between_pools(ops: DeviceOps) -> None:
    """From the device's pool to one in pinned memory, and back to other blocks."""
    shape, layers = (2, 16, 16), 2
    device = [ops.backend.new_kv_cache(6, *shape) for _ in range(layers)]
    host = [ops.backend.new_host_kv_cache(4, *shape) for _ in range(layers)]
    expected = []
    for layer, cache in enumerate(device):
        rng = np.random.default_rng(layer)
        for pool in (cache.keys, cache.values):
            values = ops.rounded(row_cases.normal(rng, *pool.shape))
            ops.target.device.write(pool, values)
            values[[1, 3]] = values[[0, 5]]
            expected.append(values)
    ops.backend.copy_blocks(host, device, np.array([[0, 2], [5, 1]], np.int64))
    ops.backend.copy_blocks(device, host, np.array([[2, 1], [1, 3]], np.int64))
    copied = [ops.host(pool) for cache in device for pool in (cache.keys, cache.values)]
    for found, values in zip(copied, expected, strict=True):
        np.testing.assert_array_equal(found, values)


def _operands(ops: DeviceOps, shape: tuple[int, int, int]) -> tuple[Any, PackedLinear]:
    rows, in_features, out_features = shape
    rng = np.random.default_rng(rows)
    weight = row_cases.normal(rng, out_features, in_features)
    bias = row_cases.normal(rng, out_features)
    x = row_cases.normal(rng, rows, in_features)
    return ops.act(x), ops.backend.pack_linear(weight, bias)


def _linear(ops: DeviceOps, shape: tuple[int, int, int], out_dtype: str) -> None:
    """Within the bound of float32 sums in any order, and one rounding to the type of out."""
    x, weight = _operands(ops, shape)
    rows, in_features, out_features = shape
    out = ops.poisoned((rows, out_features), out_dtype)
    ops.backend.linear(out, x, weight)
    exact_x, exact_weight = ops.host(x), ops.host(weight.weight)[:, :in_features]
    bias = ops.host(weight.bias)
    expected = exact_x @ exact_weight.T + bias
    size = abs(exact_x) @ abs(exact_weight).T + abs(bias)
    # Tensor cores truncate where they align addends: twice float32's unit roundoff a step.
    error = (in_features + 16) * 2.0**-23 * size
    error += UNIT_ROUNDOFF[out_dtype] * (abs(expected) + error)
    wrong = ~(abs(ops.host(out) - expected) <= error)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first at {np.argwhere(wrong)[0]}"


def _bits_of_rows(ops: DeviceOps, shape: tuple[int, int, int]) -> None:
    x, weight = _operands(ops, shape)

    def product(rows: int) -> bytes:
        out = ops.poisoned((rows, shape[2]), "float32")
        ops.backend.linear(out, x[:rows], weight)
        return ops.backend.download(out).tobytes()

    whole = product(shape[0])
    counts = [n for n in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 256, 257) if n < shape[0]]
    other = [rows for rows in counts if product(rows) != whole[: 4 * rows * shape[2]]]
    assert not other, f"with {other} rows the bits are not those of {shape[0]}"


class _DeviceSampler:
    """tests.ops.sampling_suite.SamplingOps over a backend whose logits lie on a device."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend

    def sample(self, logits: Any, rows: SamplingRows) -> npt.NDArray[np.int32]:
        return self._backend.sample(self._backend.upload(logits), rows)

    def token_logprobs(
        self, logits: Any, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows:
        return self._backend.token_logprobs(self._backend.upload(logits), token_ids, k)


def _suite_cases(
    suite: SamplingSuite, sampler: _DeviceSampler, with_parameters: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The suite's tests as pytest would run them; without parameters only those of none."""
    for name in dir(suite):
        if not name.startswith("test_"):
            continue
        test = getattr(suite, name)
        marks = getattr(test, "pytestmark", [])
        if not marks:
            yield name, partial(test, sampler)
        elif with_parameters:
            (mark,) = marks
            argument, values = mark.args
            for value in values:
                yield f"{name}[{value}]", partial(test, sampler, **{argument: value})


def _ids_of_the_cpu(ops: DeviceOps, vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    rows = 8
    logits = (rng.choice([0.5, 2, 6], (rows, 1)) * row_cases.normal(rng, rows, vocab_size)).astype(
        np.float32
    )
    cpu = CpuBackend(dtype="float32", num_threads=1)
    try:
        for params in ({}, {"temperature": 0.7, "top_k": 50}, {"top_p": 0.9, "min_p": 0.01}):
            sampled = ops.backend.sample(
                ops.backend.upload(logits), sampling_rows(rows, **params)
            )
            expected = cpu.sample(logits.copy(), sampling_rows(rows, **params))
            np.testing.assert_array_equal(sampled, expected, err_msg=str(params))
    finally:
        cpu.close()
