"""The same work by others on the same device: products by cuBLAS, attention by torch."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from bench.gpu.timing import graph_rounds, time_replays
from bench.roofline import Model
from bench.timing import Timing
from rawpaged.gpu.device import Device

_WORKSPACE_BYTES = 64 << 20
# Of cublas_api.h and library_types.h.
_AS_IT_IS, _TRANSPOSED = 0, 1
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}


class CublasError(RuntimeError):
    """A call of cuBLAS that did not give CUBLAS_STATUS_SUCCESS."""


class Cublas:
    """out [n, columns] = x @ weight.T by cublasGemmEx, on one stream and in graphs.

    CuPy's own wrapper refuses to be captured, so this one calls the library itself. Raises
    ImportError where cuBLAS is not installed.
    """

    def __init__(self, device: Device) -> None:
        self._library = _load_cublas()
        self._handle = ctypes.c_void_p()
        self._checked("cublasCreate_v2", ctypes.byref(self._handle))
        self._checked("cublasSetStream_v2", self._handle, ctypes.c_void_p(device.stream))
        # With the library's own workspace a capture would fail, or hold allocations.
        self._workspace = device.empty((_WORKSPACE_BYTES,), "uint8")
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        size = ctypes.c_size_t(_WORKSPACE_BYTES)
        self._checked("cublasSetWorkspace_v2", self._handle, workspace, size)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def __call__(self, out: Any, x: Any, weight: Any) -> None:
        """Arrays contiguous; sums in float32. cuBLAS counts columns first: out.T = W @ x.T."""
        (rows, depth), columns = x.shape, weight.shape[0]
        self._checked(
            "cublasGemmEx",
            self._handle,
            _TRANSPOSED,
            _AS_IT_IS,
            columns,
            rows,
            depth,
            ctypes.byref(self._one),
            *_operand(weight, depth),
            *_operand(x, depth),
            ctypes.byref(self._zero),
            *_operand(out, columns),
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def _checked(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise CublasError(f"{name} gave status {status}")


def _operand(array: Any, leading: int) -> tuple[ctypes.c_void_p, int, int]:
    return ctypes.c_void_p(array.data.ptr), _TYPES[array.dtype.name], leading


def _load_cublas() -> ctypes.CDLL:
    """Out of its wheel or the system's CUDA toolkit, where CuPy finds it too."""
    pathfinder = importlib.import_module("cuda.pathfinder")
    try:
        path = pathfinder.load_nvidia_dynamic_lib("cublas").abs_path
    except RuntimeError as error:
        raise ImportError(str(error)) from error
    return ctypes.CDLL(path)


def import_torch() -> Any:
    """torch if it is installed and sees a GPU, else None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def attention_seconds(torch: Any, model: Model, batch: int, tokens: int, seconds: float) -> Timing:
    """torch's scaled_dot_product_attention over whole prompts in its own dense layout."""

    def normal(heads: int) -> Any:
        shape = (batch, heads, tokens, model.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    q, k, v = normal(model.num_heads), normal(model.num_kv_heads), normal(model.num_kv_heads)
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> None:
        attend(q, k, v, is_causal=True, enable_gqa=True)

    with torch.inference_mode():
        return _time_torch(torch, call, seconds)


def _time_torch(torch: Any, call: Callable[[], None], seconds: float) -> Timing:
    """As bench.gpu.timing.time_device, with torch's own graphs and events."""

    def clock(work: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    rounds = graph_rounds(clock(call), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            call()
    graph.replay()
    return time_replays(clock, graph.replay, seconds, rounds)
