"""What a launch is refused for before it runs, which bytes it may touch, and what is compiled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawpaged.gpu.module import Function, Parameter
from tests.hostsim.loader import CompileError, HostLoader, HostSimError, parse_signatures
from tests.hostsim.wheels import CudaWheels, compiler_version, find_compiler

pytestmark = pytest.mark.gpusim

SOURCE = """
#include "gpu.cuh"
extern "C" __global__ void __launch_bounds__(64, 2) scale(
    const float* __restrict__ x, float* __restrict__ y, int n, float factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * factor;
}
extern "C" __global__ void add(const float* x, float* y) {
  y[threadIdx.x] = y[threadIdx.x] + x[threadIdx.x];
}
extern "C" __global__ void write_at(float* y, long long i, unsigned value) {
  y[i] = (float)value;
}
extern "C" __global__ void widen(const bf16* x, const half* y, float* sums) {
  sums[threadIdx.x] = to_float(x[threadIdx.x]) + to_float(y[threadIdx.x]);
}
extern "C" __global__ void shared_bytes(float* y, int bytes) {
  DYN_SMEM(memory);
  SHARED(float, s, [256]);
  s[0] = 1.0f;
  memory[bytes - 1] = 2;
  y[0] = s[0] + memory[bytes - 1];
}
extern "C" __global__ void number_of_block(int* y, int* turns) {
  y[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] = atomicAdd(turns, 1);
}
extern "C" __global__ void return_unset_local(float* y) {
  float values[4];
  if (y[0] > 0.0f) values[2] = 1.0f;
  y[1] = values[(int)y[2]];
}
"""
NAMES = list(parse_signatures(SOURCE))
LIMITS = dict.fromkeys(NAMES, 0)


def load(loader: HostLoader) -> dict[str, Function]:
    return loader.load(SOURCE, NAMES, max_shared_mem=LIMITS)


@pytest.fixture(scope="module")
def functions(cuda_wheels: CudaWheels) -> dict[str, Function]:
    return load(HostLoader())


def floats(length: int) -> np.ndarray[Any, Any]:
    return np.arange(1, length + 1, dtype=np.float32)


def test_signatures_are_read_out_of_the_text() -> None:
    signature = parse_signatures(SOURCE)["scale"]
    assert signature.max_threads == 64
    assert signature.parameters == (
        Parameter("const float*", "x"),
        Parameter("float*", "y"),
        Parameter("int", "n"),
        Parameter("float", "factor"),
    )
    with pytest.raises(TypeError, match="double x is not supported"):
        parse_signatures('extern "C" __global__ void f(double x) {}')


@pytest.mark.parametrize("mode", ["check", "plain"])
def test_launch_in_both_modes(cuda_wheels: CudaWheels, mode: Any) -> None:
    x, y = floats(100), np.zeros(100, np.float32)
    load(HostLoader(mode))["scale"]((2,), (64,), (x, y, np.int32(90), np.float32(3)))
    np.testing.assert_array_equal(y, np.where(np.arange(100) < 90, 3 * x, 0))


def test_arguments_are_checked(functions: dict[str, Function]) -> None:
    scale, x, y = functions["scale"], floats(4), floats(4)
    n, factor = np.int32(4), np.float32(2)
    with pytest.raises(TypeError, match="scale takes 4 arguments, not 3"):
        scale((1,), (4,), (x, y, n))
    with pytest.raises(TypeError, match="n must be a NumPy int32, not 4"):
        scale((1,), (4,), (x, y, 4, factor))
    with pytest.raises(TypeError, match="factor must be a NumPy float32"):
        scale((1,), (4,), (x, y, n, np.float64(2)))
    with pytest.raises(TypeError, match="x must be an array"):
        scale((1,), (4,), (np.float32(1), y, n, factor))
    with pytest.raises(TypeError, match="n must be a NumPy int32"):
        scale((1,), (4,), (x, y, np.ones(1, np.int32), factor))
    y.flags.writeable = False
    with pytest.raises(ValueError, match="y is written, but its array is read-only"):
        scale((1,), (4,), (x, y, n, factor))


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0,), (4,)),
        ((1, 70000), (4,)),
        ((1,), (65,)),
        ((1,), (1, 1, 65)),
        ((1,), ()),
        ((1, 1, 1, 1), (4,)),
    ],
)
def test_sizes_are_checked(
    functions: dict[str, Function], grid: tuple[int, ...], block: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"scale: (grid|block)="):
        functions["scale"](grid, block, (floats(4), floats(4), np.int32(4), np.float32(1)))


def test_names_and_options_are_checked(cuda_wheels: CudaWheels) -> None:
    with pytest.raises(ValueError, match='no extern "C" kernel absent'):
        HostLoader().load(SOURCE, ["absent"], max_shared_mem={"absent": 0})
    options: list[dict[str, Any]] = [
        {"mode": "fast"},
        {"order": "sideways"},
        {"mode": "plain", "profile": True},
        {"mode": "plain", "preempt": True},
    ]
    for option in options:
        with pytest.raises(ValueError, match=r"must be|no profile"):
            HostLoader(**option)


def test_shared_memory_has_to_be_asked_for(cuda_wheels: CudaWheels) -> None:
    """48 KB with the static arrays, or what was declared, up to 227 KB with the static arrays."""
    kib = 1024

    def launch(asked: int, dynamic: int) -> None:
        loader = HostLoader()
        functions = loader.load(SOURCE, ["shared_bytes"], max_shared_mem={"shared_bytes": asked})
        y = floats(1)
        functions["shared_bytes"]((1,), (1,), (y, np.int32(dynamic)), shared_mem=dynamic)
        assert y[0] == 3

    launch(0, 47 * kib)
    launch(100 * kib, 100 * kib)
    launch(226 * kib, 226 * kib)
    with pytest.raises(HostSimError, match="shared-limit"):
        launch(0, 48 * kib)
    with pytest.raises(HostSimError, match="shared-limit"):
        launch(227 * kib, 227 * kib)
    for asked, dynamic in ((0, 49 * kib), (100 * kib, 101 * kib), (300 * kib, 228 * kib)):
        with pytest.raises(ValueError, match="shared_mem"):
            launch(asked, dynamic)


def test_any_element_type_is_memory(functions: dict[str, Function]) -> None:
    x, y = floats(4).astype(ml_dtypes.bfloat16), floats(4).astype(np.float16)
    sums = np.zeros(4, np.float32)
    functions["widen"]((1,), (4,), (x, y, sums))
    np.testing.assert_array_equal(sums, 2 * floats(4))


def test_a_view_opens_only_its_own_bytes(functions: dict[str, Function]) -> None:
    whole = floats(64)
    write = functions["write_at"]
    write((1,), (1,), (whole[16:32], np.int64(15), np.uint32(7)))
    assert whole[31] == 7
    for outside in (-1, 16):
        with pytest.raises(HostSimError, match="global-out-of-bounds"):
            write((1,), (1,), (whole[16:32], np.int64(outside), np.uint32(7)))
    rows = whole.reshape(8, 8)[:, 2:4]  # from byte 8 to byte 240
    write((1,), (1,), (rows, np.int64(57), np.uint32(9)))
    assert whole[59] == 9
    with pytest.raises(HostSimError, match="at byte 232 of `y`, which has 232 bytes"):
        write((1,), (1,), (rows, np.int64(58), np.uint32(9)))


def test_one_array_under_two_names_may_be_written(functions: dict[str, Function]) -> None:
    x = floats(8)
    functions["add"]((1,), (8,), (x, x))
    np.testing.assert_array_equal(x, 2 * floats(8))


def test_empty_arrays_open_nothing(functions: dict[str, Function]) -> None:
    with pytest.raises(HostSimError, match="global-out-of-bounds"):
        functions["write_at"]((1,), (1,), (floats(0), np.int64(0), np.uint32(1)))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_blocks_take_turns_in_order(cuda_wheels: CudaWheels, order: Any) -> None:
    y, turns = np.zeros(24, np.int32), np.zeros(1, np.int32)
    load(HostLoader(order=order, seed=5))["number_of_block"]((2, 3, 4), (1,), (y, turns))
    expected = np.arange(24)
    if order == "random":
        assert sorted(y) == expected.tolist()
        assert (y != expected).any()
    else:
        np.testing.assert_array_equal(y, expected if order == "forward" else expected[::-1])


def test_a_fault_leaves_the_function_usable(functions: dict[str, Function]) -> None:
    y = floats(4)
    with pytest.raises(HostSimError):
        functions["write_at"]((1,), (1,), (y, np.int64(4), np.uint32(1)))
    functions["write_at"]((1,), (1,), (y, np.int64(3), np.uint32(1)))
    assert y[3] == 1


def test_unset_locals_are_conspicuous(functions: dict[str, Function]) -> None:
    if int(compiler_version(find_compiler()).split(".")[0]) < 12:
        pytest.skip("this g++ cannot fill locals")
    y = np.array([0, 0, 2], np.float32)
    functions["return_unset_local"]((1,), (1,), (y,))
    assert abs(y[1]) > 1e38


def test_launches_from_threads_wait_for_each_other(functions: dict[str, Function]) -> None:
    outputs = [np.zeros(6400, np.float32) for _ in range(4)]

    def launch(y: np.ndarray[Any, Any]) -> None:
        for _ in range(5):
            args = (floats(6400), y, np.int32(6400), np.float32(2))
            functions["scale"]((100,), (64,), args)

    threads = [threading.Thread(target=launch, args=(y,)) for y in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y in outputs:
        np.testing.assert_array_equal(y, 2 * floats(6400))


def test_what_the_compiler_says_is_passed_on(cuda_wheels: CudaWheels) -> None:
    kernel = 'extern "C" __global__ void f(int* y) { z = 1; }'
    text = f'#line 1 "broken.cu"\n#include "gpu.cuh"\n{kernel}'
    with pytest.raises(CompileError, match=r"broken\.cu:2:\d+: error: .*z"):
        HostLoader().load(text, ["f"], max_shared_mem={"f": 0})


def test_compiled_kernels_are_found_again(cuda_wheels: CudaWheels, tmp_path: Path) -> None:
    def libraries() -> list[Path]:
        return sorted(tmp_path.glob("kernel-*.so"))

    def load_text(text: str) -> None:
        HostLoader(cache=tmp_path).load(text, ["f"], max_shared_mem={"f": 0})

    text = '#include "gpu.cuh"\nextern "C" __global__ void f(int* y) { y[0] = 1; }'
    load_text(text)
    [first] = libraries()
    built = first.stat().st_mtime_ns
    load_text(text)
    assert libraries() == [first]
    assert first.stat().st_mtime_ns == built
    load_text(text.replace("= 1", "= 2"))
    assert len(libraries()) == 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".o"}
