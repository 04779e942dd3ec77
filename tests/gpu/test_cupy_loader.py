"""What CupyLoader asks of CuPy, with a stand-in for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawpaged.gpu.cupy_loader import CupyLoader


class _Kernel:
    """A RawKernel that keeps its calls."""

    def __init__(self) -> None:
        self.max_dynamic_shared_size_bytes = 0
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Any) -> None:
        self.calls.append((grid, block, args, shared_mem, stream))


class _Cupy(SimpleNamespace):
    """Its arrays are NumPy's."""

    def __init__(self) -> None:
        super().__init__(ndarray=np.ndarray)
        self.kernels: dict[str, _Kernel] = {}
        self.options: tuple[str, ...] = ()

    def RawModule(self, *, code: str, options: tuple[str, ...], backend: str) -> Any:
        self.options = options
        return SimpleNamespace(get_function=self._kernel)

    def _kernel(self, name: str) -> _Kernel:
        self.kernels[name] = _Kernel()
        return self.kernels[name]


class _Foreign:
    """An array of another library."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


def load(stream: Any = None) -> tuple[_Cupy, Any]:
    cupy = _Cupy()
    functions = CupyLoader(cupy, stream).load(
        "", ["small", "large"], max_shared_mem={"small": 48 * 1024, "large": 48 * 1024 + 16}
    )
    return cupy, functions


def test_arrays_of_other_libraries_become_addresses() -> None:
    cupy, functions = load()
    own, scalar = np.zeros(2, np.float32), np.int32(5)
    functions["small"]((1,), (32,), (own, _Foreign(4096), scalar))
    ((grid, block, args, shared_mem, stream),) = cupy.kernels["small"].calls
    assert (grid, block, shared_mem, stream) == ((1,), (32,), 0, None)
    assert args[0] is own
    assert (args[1], type(args[1])) == (4096, np.uintp)
    assert args[2] is scalar


def test_launches_go_to_the_given_stream() -> None:
    cupy, functions = load("stream")
    functions["large"]((2, 3), (64,), (), shared_mem=50_000)
    assert cupy.kernels["large"].calls == [((2, 3), (64,), (), 50_000, "stream")]


def test_more_shared_memory_is_asked_for_where_it_is_needed() -> None:
    cupy, _ = load()
    sizes = {name: kernel.max_dynamic_shared_size_bytes for name, kernel in cupy.kernels.items()}
    assert sizes == {"small": 0, "large": 48 * 1024 + 16}


def test_headers_are_part_of_the_options() -> None:
    """CuPy's cache knows kernels by their source and options."""
    cupy, _ = load()
    assert sum(option.startswith("-DHEADERS_") for option in cupy.options) == 1


def test_arrays_on_the_host_are_refused() -> None:
    """A GPU that follows an address of the host's ends the process, or worse."""
    cupy = _Cupy()
    cupy.ndarray = _Foreign
    functions = CupyLoader(cupy, None).load("", ["k"], max_shared_mem={"k": 0})
    with pytest.raises(TypeError, match="ndarray has no __cuda_array_interface__"):
        functions["k"]((1,), (32,), (np.zeros(2, np.float32),))
    assert not cupy.kernels["k"].calls
