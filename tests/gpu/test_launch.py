"""Launches: what arguments become, what is refused, and that prepared ones keep no arrays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawpaged.gpu.arguments import as_array, is_array, scalar_converter
from rawpaged.gpu.arrays import array_info, has_contiguous_axes
from rawpaged.gpu.launch import Function, Operand, PreparedLaunches
from rawpaged.gpu.linear import Linear, PackedLinear
from rawpaged.gpu.linear_kernels import Epilogue, Mode
from rawpaged.gpu.module import Kernel, KernelDeclaration, instantiate
from rawpaged.gpu.norm import RmsNorm
from rawpaged.gpu.tuned import linear_tiles

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DECLARATION = KernelDeclaration(
    "x.cu", "f", "const T* x, T* out, int n, long long stride, unsigned bits, float scale"
)


class Calls:
    """A Loader whose kernels keep their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.names: list[str] = []

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        return {name: partial(self.named, name) for name in names}

    def named(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.names.append(name)
        self.function(*args, **kwargs)

    def function(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        self.calls.append((grid, block, args, shared_mem))


class Foreign:
    """An array of another library, which knows no axes but those that it describes."""

    def __init__(self, shape: tuple[int, ...] = (2,)) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
        }


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def kernel(calls: Calls) -> Kernel:
    instance = instantiate(DECLARATION, "f_f32", (), types={"T": "float"}, threads=32)
    return Kernel(instance, calls.function)


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


# Arguments


@pytest.mark.parametrize(
    ("c_type", "kind", "low", "high"),
    [
        ("int", np.int32, -(2**31), 2**31 - 1),
        ("long long", np.int64, -(2**63), 2**63 - 1),
        ("unsigned", np.uint32, 0, 2**32 - 1),
    ],
)
def test_integers_have_the_exact_type_or_are_refused(
    c_type: str, kind: Any, low: int, high: int
) -> None:
    convert = scalar_converter(c_type, "n")
    for number in (low, high, 5, True, np.int64(7), np.uint8(3), 4.0):
        for _ in range(2):
            converted = convert(number)
            assert (type(converted), converted) == (kind, number)
    wrong: list[Any] = [low - 1, high + 1, 1.5, np.float32(0.5), -0.5]
    if kind is not np.int64:
        wrong.append(np.int64(high + 1))
    for number in wrong:
        with pytest.raises(OverflowError, match=f"is no {c_type} n"):
            convert(number)


def test_floats_are_rounded_and_keep_their_sign() -> None:
    convert = scalar_converter("float", "x")
    for number in (0.0, -0.0, 0.1, np.float64(1e30), 3, float("inf")):
        converted = convert(number)
        assert type(converted) is np.float32
        assert converted.tobytes() == np.float32(number).tobytes()
    with pytest.raises(TypeError):
        convert(floats(3))


def test_what_is_an_array() -> None:
    for array in (floats(1), floats(0, 3), np.zeros(2, BFLOAT16), Foreign()):
        assert is_array(array)
        assert as_array("x", array) is array
    for other in (5, 0.5, None, [1.0], np.float32(1), floats(), Foreign(()), floats):
        assert not is_array(other)
        with pytest.raises(TypeError, match="x must be an array"):
            as_array("x", other)


# Arrays


def test_facts_are_those_of_now() -> None:
    """Layouts are remembered, addresses are not: an array may be resized, or be another one."""
    array = np.zeros((4, 6), np.int32)
    info = array_info(array)
    assert info == (array.ctypes.data, (4, 6), (6, 1), "int32", 4)
    assert array_info(array[1:, 2:]) == (array.ctypes.data + 32, (3, 4), (6, 1), "int32", 4)
    assert array_info(array.T).strides == (1, 6)
    assert array_info(np.zeros((2, 2), BFLOAT16)).dtype == "bfloat16"
    assert array_info(np.zeros((2, 2), np.uint16)).dtype == "uint16"
    array.resize((30, 40), refcheck=False)
    assert array_info(array)[:2] == (array.ctypes.data, (30, 40))


def test_axes_without_gaps() -> None:
    array = floats(4, 6, 8)
    for view, count, expected in (
        (array, 3, True),
        (array[:, :3], 2, True),
        (array[:, :3], 3, False),
        (array[:, :, ::2], 1, False),
        (array[:1, :3], 3, True),
        (array[:0, ::3, ::2], 3, True),
    ):
        for _ in range(2):
            assert has_contiguous_axes(array_info(view), count) is expected


# Kernels


def test_a_call_converts_by_the_signature(kernel: Kernel, calls: Calls) -> None:
    x, out = floats(2), Foreign()
    kernel((1, 2), (32,), x, out, 3, 4, 5, 0.5, shared_mem=48 * 1024)
    (grid, block, args, shared_mem) = calls.calls[0]
    assert (grid, block, shared_mem) == ((1, 2), (32,), 48 * 1024)
    assert args[0] is x
    assert args[1] is out
    assert [type(arg) for arg in args[2:]] == [np.int32, np.int64, np.uint32, np.float32]


@pytest.mark.parametrize(
    ("args", "shared_mem", "error", "words"),
    [
        ((1, 2, 3), 0, TypeError, "takes 6 arguments, not 3"),
        ((floats(1), 5, 3, 4, 5, 0.5), 0, TypeError, "f_f32: out must be an array"),
        ((np.float32(1), floats(1), 3, 4, 5, 0.5), 0, TypeError, "f_f32: x must be an array"),
        ((floats(1), floats(1), 2**31, 4, 5, 0.5), 0, OverflowError, "is no int f_f32: n"),
        ((floats(1), floats(1), 3, 4, -1, 0.5), 0, OverflowError, "unsigned f_f32: bits"),
        ((floats(1), floats(1), 3, 4, 5, 0.5), 48 * 1024 + 1, ValueError, "than was declared"),
    ],
)
def test_calls_that_do_not_fit(
    kernel: Kernel, calls: Calls, args: Any, shared_mem: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kernel((1,), (32,), *args, shared_mem=shared_mem)
    # Prepared, the arrays are to come, and the same is wrong with the rest.
    if "must be an array" not in words:
        prepared = [Operand(0) if isinstance(arg, np.ndarray) else arg for arg in args]
        with pytest.raises(error, match=words):
            kernel.prepare((1,), (32,), *prepared, shared_mem=shared_mem)
    assert not calls.calls


def test_a_prepared_launch_makes_the_same_call(kernel: Kernel, calls: Calls) -> None:
    arrays = [floats(2), floats(3), floats(4)]
    kernel((7,), (32,), arrays[2], arrays[0], 3, 4, 5, 0.5, shared_mem=64)
    launch = kernel.prepare((7,), (32,), Operand(2), Operand(0), 3, 4, 5, 0.5, shared_mem=64)
    launch(arrays)
    called, prepared = calls.calls
    assert called[:2] == prepared[:2]
    assert called[3] == prepared[3] == 64
    assert all(a is b for a, b in zip(called[2][:2], prepared[2][:2], strict=True))
    assert [(type(a), a) for a in called[2][2:]] == [(type(a), a) for a in prepared[2][2:]]


def test_a_prepared_launch_takes_arrays_only(kernel: Kernel, calls: Calls) -> None:
    with pytest.raises(TypeError, match="out must be an Operand"):
        kernel.prepare((1,), (32,), Operand(0), floats(1), 3, 4, 5, 0.5)
    with pytest.raises(TypeError):
        kernel.prepare((1,), (32,), Operand(0), Operand(1), Operand(2), 4, 5, 0.5)
    launch = kernel.prepare((1,), (32,), Operand(0), Operand(1), 3, 4, 5, 0.5)
    with pytest.raises(TypeError, match="f_f32 must be an array"):
        launch((floats(1), 4096))
    assert not calls.calls


def test_a_prepared_launch_keeps_no_array(kernel: Kernel) -> None:
    kernel = Kernel(kernel.instance, lambda *args, **kwargs: None)
    launch = kernel.prepare((1,), (32,), Operand(0), Operand(1), 3, 4, 5, 0.5)
    array = floats(2)
    kept = weakref.ref(array)
    launch((array, array))
    del array
    gc.collect()
    assert kept() is None


def test_prepared_launches_are_a_bounded_number(kernel: Kernel) -> None:
    launches = PreparedLaunches(most=3)
    one = (kernel.prepare((1,), (32,), Operand(0), Operand(1), 3, 4, 5, 0.5),)
    for key in range(3):
        assert launches.put(key, one) is one
    assert [launches.get(key) for key in range(3)] == [one] * 3
    launches.put(3, one)
    assert [launches.get(key) for key in range(4)] == [None, None, None, one]


# Launchers that prepare


def arrays_of(calls: Calls) -> list[Any]:
    return [arg for arg in calls.calls[-1][2] if isinstance(arg, np.ndarray)]


def test_norms_check_each_layout_and_launch_over_the_arrays_given(calls: Calls) -> None:
    norm = RmsNorm(calls, dtype="bfloat16", size=256)
    weight = floats(256)
    for rows in (3, 3, 5):
        out, x, residual = np.zeros((rows, 256), BFLOAT16), floats(rows, 256), floats(rows, 256)
        norm.rms_norm(out, x, weight, 1e-5)
        assert [id(a) for a in arrays_of(calls)] == [id(out), id(x), id(weight)]
        assert calls.calls[-1][2][3] == rows
        delta = np.zeros((rows, 256), BFLOAT16)
        norm.add_rms_norm(out, delta, residual, weight, 1e-5)
        assert [id(a) for a in arrays_of(calls)] == [id(a) for a in (out, delta, residual, weight)]
    norm.rms_norm(out, out, weight, 1e-5)
    assert [id(a) for a in arrays_of(calls)] == [id(out), id(weight)]
    norm.rms_norm(out, x, weight, 1e-6)
    assert calls.calls[-1][2][-1] == np.float32(1e-6)


def test_norms_refuse_what_only_looks_like_what_was_prepared(calls: Calls) -> None:
    norm = RmsNorm(calls, dtype="bfloat16", size=256)
    weight, out, x = floats(256), np.zeros((3, 256), BFLOAT16), floats(3, 256)
    delta = np.zeros((3, 256), BFLOAT16)
    norm.rms_norm(out, x, weight, 1e-5)
    norm.add_rms_norm(out, delta, x, weight, 1e-5)
    made = len(calls.calls)
    crooked = floats(3 * 256 + 1)[1:].reshape(3, 256)
    wrong: list[tuple[Any, ...]] = [
        (out, crooked, weight),
        (out, floats(3, 255), weight),
        (out, x, floats(257)[1:]),
        (out, x[:, ::-1], weight),
        (x, x, weight),
    ]
    for to, source, scale in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            norm.rms_norm(to, source, scale, 1e-5)
    sums: list[tuple[Any, ...]] = [
        (out, out, x, weight),  # laid out as what was prepared, but one array twice
        (out, delta, crooked, weight),
        (out, delta[:2], x, weight),
    ]
    for to, source, total, scale in sums:
        with pytest.raises(ValueError, match="do not fit"):
            norm.add_rms_norm(to, source, total, scale, 1e-5)
    assert len(calls.calls) == made


def linear(calls: Calls, workspace: int = 0) -> Linear:
    return Linear(
        calls,
        dtype="bfloat16",
        tiles=linear_tiles(90),
        modes=(Mode(Epilogue.STORE, "bfloat16"), Mode(Epilogue.ADD, "float32")),
        num_sms=132,
        workspace=floats(workspace),
    )


def packed(out_features: int, in_features: int) -> PackedLinear:
    weight = np.zeros((out_features, in_features), BFLOAT16)
    bias = floats(out_features)
    return PackedLinear(weight, bias, "bfloat16", out_features, in_features, in_features)


@pytest.mark.parametrize("rows", [1, 20, 40, 300])
@pytest.mark.parametrize("workspace", [0, 8 * 300 * 256])
def test_products_launch_over_the_arrays_given(calls: Calls, rows: int, workspace: int) -> None:
    op = linear(calls, workspace)
    for _ in range(2):
        calls.calls.clear()
        weight = packed(256, 512)
        x, out = np.zeros((rows, 512), BFLOAT16), np.zeros((rows, 256), BFLOAT16)
        op(out, x, weight)
        assert len(calls.calls) == (2 if workspace and rows > 32 else 1)
        used = {id(arg) for call in calls.calls for arg in call[2] if isinstance(arg, np.ndarray)}
        mine = {id(array) for array in (x, out, weight.weight, weight.bias)}
        assert mine <= used <= mine | {id(op._workspace)}


def test_products_of_other_layouts_are_others(calls: Calls) -> None:
    """Everything that decides a launch is part of what it is remembered by."""
    op = linear(calls)
    x, out = np.zeros((3, 512), BFLOAT16), np.zeros((3, 256), BFLOAT16)
    wide = np.zeros((3, 300), BFLOAT16)[:, :256]
    cases: list[tuple[Any, Any, PackedLinear, Epilogue]] = [
        (out, x, packed(256, 512), Epilogue.STORE),
        (wide, x, packed(256, 512), Epilogue.STORE),
        (floats(3, 256), x, packed(256, 512), Epilogue.ADD),
        (out[:2], x[:2], packed(256, 512), Epilogue.STORE),
        (out, np.zeros((3, 256), BFLOAT16), packed(256, 256), Epilogue.STORE),
        (np.zeros((3, 128), BFLOAT16), x, packed(128, 512), Epilogue.STORE),
    ]
    launched = []
    for case in cases * 2:
        op(*case)
        grid, block, args, shared_mem = calls.calls[-1]
        numbers = tuple(arg for arg in args if not isinstance(arg, np.ndarray))
        launched.append((calls.names[-1], grid, block, numbers, shared_mem, args[0] is case[1]))
    assert launched[: len(cases)] == launched[len(cases) :]
    assert len(set(launched)) == len(cases)


def test_products_refuse_what_only_looks_like_what_was_prepared(calls: Calls) -> None:
    op = linear(calls)
    x, out, weight = np.zeros((3, 512), BFLOAT16), np.zeros((3, 256), BFLOAT16), packed(256, 512)
    op(out, x, weight)
    crooked = np.zeros(3 * 512 + 1, BFLOAT16)[1:].reshape(3, 512)
    half = PackedLinear(weight.weight, weight.bias, "float16", 256, 512, 512)
    for arrays in (
        (out, crooked, weight),
        (out[:2], x, weight),
        (out, x[:, ::-1], weight),
        (out, x, packed(256, 504)),
        (out, x, packed(255, 512)),
        (out, x, half),
        (out, x.view(np.float16), weight),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            op(*arrays)
    with pytest.raises(ValueError, match="not declared"):
        op(floats(3, 256), x, weight)
    assert len(calls.calls) == 1
