"""Launches kernels of gpu/numba_kernels.py: arrays as Numba takes them, on a given stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.cuda
import numpy as np
import numpy.typing as npt

from rawpaged.gpu.arrays import array_info, interface_of

_cuda: Any = numba.cuda
_config: Any = numba.config
_BFLOAT16 = "<V2"
_UINT16 = "<u2"


class NumbaFunction:
    """A Function over a Numba kernel, compiled when it first meets its arguments' types.

    `stream` is an address, 0 for the default stream, which is what Numba's simulator has. Arrays
    may be anything that has __cuda_array_interface__; in the simulator they are NumPy's.
    """

    def __init__(self, kernel: Callable[..., None], stream: int) -> None:
        self._dispatcher = _cuda.jit(kernel)
        self._stream = _cuda.external_stream(stream) if stream else 0

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        launch = self._configured(grid, block, shared_mem)
        launch(*(numba_argument(arg) for arg in args))

    def _configured(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int
    ) -> Callable[..., None]:
        """Numba's launch of this size, without its warning that small grids leave a GPU idle.

        The setting is read at this moment only; a program that uses Numba for itself keeps its own.
        """
        before = _config.CUDA_LOW_OCCUPANCY_WARNINGS
        _config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
        try:
            configured: Callable[..., None] = self._dispatcher[
                grid, block, self._stream, shared_mem
            ]
        finally:
            _config.CUDA_LOW_OCCUPANCY_WARNINGS = before
        return configured


class _View:
    """An array by its description alone."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self._owner = owner


def numba_argument(array: Any) -> Any:
    """The array with bfloat16 as uint16, and with no stream that Numba would wait for.

    Launches are ordered by the device's one stream; waiting would also break a graph's capture.
    Raises TypeError for arrays that are not on a GPU.
    """
    if _config.ENABLE_CUDASIM:
        return _simulated(array)
    if not hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"a {type(array).__name__} has no __cuda_array_interface__")
    interface = interface_of(array)
    interface["stream"] = None
    if interface["typestr"] == _BFLOAT16:
        interface |= {"typestr": _UINT16, "descr": [("", _UINT16)]}
    return _View(interface, array)


def _simulated(array: npt.NDArray[Any]) -> Any:
    """The array as the simulator's device memory; else it would work on copies."""
    bits = array.view(np.uint16) if array_info(array).dtype == "bfloat16" else array
    simulated_array = type(_cuda.device_array(0))
    return simulated_array(bits)
