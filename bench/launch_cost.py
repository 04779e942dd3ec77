"""What launching costs in Python: ops of the CUDA backend over kernels that do nothing.

    python -m bench.launch_cost

It needs no GPU. Arrays are NumPy's, or CuPy's over host memory (`--cupy`, which needs CuPy but no
driver). What CuPy, Numba and the driver take for a launch themselves comes on top.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.attention_cases import make_batch
from bench.rows import format_table
from rawpaged.backend import AttentionPlan, KVCache
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.device import numpy_dtype
from rawpaged.gpu.module import Function
from rawpaged.models.config import ModelConfig, RopeConfig
from rawpaged.models.llama import Llama
from rawpaged.models.weights import LlamaLayer, LlamaWeights
from rawpaged.tracing import Tracer
from tests.hostsim.device import HostDevice

_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope=RopeConfig(rope_theta=500000.0),
    tie_word_embeddings=False,
    dtype="bfloat16",
)
"""Heads as Llama-3-8B's; what launching costs depends on no size, so the rest is small."""

_BLOCK_SIZE = 16


@dataclass(slots=True)
class _Launches:
    """A Loader whose kernels only keep what they were called with."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    keeps: bool = False

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        return {name: self.call for name in names}

    def call(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        if self.keeps:
            self.calls.append(args)


class _NothingRuns(HostDevice):
    """Arrays without contents, and kernels that return at once."""

    def __init__(self, new: Callable[[tuple[int, ...], np.dtype[Any]], Any]) -> None:
        self.launches = _Launches()
        super().__init__(self.launches)
        self._new = new

    @property
    def loader(self) -> _Launches:
        return self.launches

    def jit(self, kernel: Callable[..., None]) -> Function:
        return self.launches.call

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._new(shape, numpy_dtype(dtype))

    def upload(self, array: npt.NDArray[Any], dtype: str | None = None) -> Any:
        return self._new(array.shape, array.dtype if dtype is None else numpy_dtype(dtype))


class _Spy:
    """A backend that keeps calls of its ops, to make them again."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self.calls: list[tuple[str, Callable[[], Any]]] = []

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, lambda: op(*args, **kwargs)))
            return op(*args, **kwargs)

        return call


def main(arguments: Sequence[str] | None = None) -> int:
    """Print microseconds of each op of a layer, for a decode step and for a prompt."""
    parser = argparse.ArgumentParser(prog="python -m bench.launch_cost", description=__doc__)
    parser.add_argument("--cupy", action="store_true", help="CuPy's arrays instead of NumPy's")
    parser.add_argument("--repeat", type=int, default=40, help="of which the least time counts")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat} must be at least 1")
    new = _cupy_arrays() if options.cupy else np.empty
    rows = []
    for name, queries in (("decode", 1), ("prefill", 40)):
        rows += measure(name, queries, new, options.repeat)
    print(format_table(["step", "op", "launches", "us", "us a launch"], rows))
    return 0


def measure(
    name: str, queries: int, new: Callable[..., Any], repeat: int, number: int = 200
) -> list[tuple[object, ...]]:
    """(step, op, launches, us, us a launch) of each op of the second layer, and of them all."""
    device = _NothingRuns(new)
    backend = CudaBackend(device, dtype="bfloat16")
    rows: list[tuple[object, ...]] = []
    total = launches = 0.0
    for op, call in _layer_calls(backend, queries):
        device.launches.keeps = True
        call()
        device.launches.keeps = False
        count = len(device.launches.calls)
        device.launches.calls.clear()
        spent = 1e6 * _least_seconds(call, repeat, number)
        rows.append((name, op, count, spent, spent / count))
        total, launches = total + spent, launches + count
    rows.append((name, "layer", int(launches), total, total / launches))
    return rows


def _least_seconds(call: Callable[[], Any], repeat: int, number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number


def _layer_calls(backend: CudaBackend, queries: int) -> list[tuple[str, Callable[[], Any]]]:
    """Calls of the ops of the second layer, which begins as all but the first do."""
    heads, kv_heads = _MODEL.num_heads, _MODEL.num_kv_heads
    requests, context = 4, 300
    width = -(-context // _BLOCK_SIZE)
    caches: list[KVCache] = [
        backend.new_kv_cache(requests * width, kv_heads, _MODEL.head_dim, _BLOCK_SIZE)
        for _ in range(_MODEL.num_layers)
    ]
    tables = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
    plan: AttentionPlan = backend.plan(
        make_batch(tables, queries, context), num_heads=heads, num_kv_heads=kv_heads
    )
    model = Llama(
        _MODEL,
        _weights(backend),
        backend,
        max_num_tokens=requests * queries,
        max_logits_rows=requests,
        max_model_len=context,
    )
    spy = _Spy(backend)
    model.set_tracer(Tracer(), spy)
    model.forward(plan, caches)
    # All but the embedding before the first layer and the norm after the last.
    per_layer, rest = divmod(len(spy.calls) - 2, _MODEL.num_layers)
    assert rest == 0, [name for name, _ in spy.calls]
    return spy.calls[1 + per_layer : 1 + 2 * per_layer]


def _weights(backend: CudaBackend) -> LlamaWeights:
    hidden, inner = _MODEL.hidden_size, _MODEL.intermediate_size
    qkv = (_MODEL.num_heads + 2 * _MODEL.num_kv_heads) * _MODEL.head_dim

    def linear(out_features: int, in_features: int) -> Any:
        return backend.pack_linear(np.zeros((out_features, in_features), np.float32), None)

    norm = backend.upload(np.ones(hidden, np.float32))
    layer = LlamaLayer(
        input_layernorm=norm,
        qkv_proj=linear(qkv, hidden),
        q_norm=None,
        k_norm=None,
        o_proj=linear(hidden, _MODEL.num_heads * _MODEL.head_dim),
        post_attention_layernorm=norm,
        gate_up_proj=linear(2 * inner, hidden),
        down_proj=linear(hidden, inner),
    )
    table = linear(_MODEL.vocab_size, hidden)
    return LlamaWeights(table, (layer,) * _MODEL.num_layers, norm, table)


def _cupy_arrays() -> Callable[[tuple[int, ...], np.dtype[Any]], Any]:
    """Makes CuPy's arrays over host memory, which need no device as long as nothing runs."""
    import cupy

    def new(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        host = np.empty(shape, dtype)
        memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, device_id=0)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))

    return new


if __name__ == "__main__":
    sys.exit(main())
