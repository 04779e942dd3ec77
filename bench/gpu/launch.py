"""What launches cost: out of Python, and in a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target
from bench.gpu.timing import time_replays
from rawpaged.gpu.backend import CudaBackend
from tests.ops.sampling_suite import sampling_rows

_EMPTY = 'extern "C" __global__ void __launch_bounds__(32) empty(int* unused) {}\n'


def time_launches(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """An empty kernel, ops of the backend, a graph, and a whole call of the sampler."""
    device, count = target.device, sizes.graph_launches
    empty = device.loader.load(_EMPTY, ["empty"], max_shared_mem={"empty": 0})["empty"]
    unused = device.empty((1,), "int32")

    def launch() -> None:
        empty((1,), (32,), (unused,))

    recorder.measure("empty kernel", {"launches": count}, partial(_queued, target, launch, count))
    recorder.measure("graph", {"launches": count}, partial(_graph, target, launch, count))
    backend = CudaBackend(device, dtype="bfloat16")
    for name, op in _ops(backend, sizes).items():
        recorder.measure(f"op/{name}", {"launches": count}, partial(_queued, target, op, count))
    rows, vocab_size = sizes.step_batches[-1], sizes.model.vocab_size
    logits = backend.upload(np.zeros((rows, vocab_size), np.float32))
    params = sampling_rows(rows, temperature=0.8, top_k=50)
    recorder.measure(
        "sample with its copies",
        {"rows": rows, "vocab_size": vocab_size},
        lambda: _queued(target, lambda: backend.sample(logits, params), max(1, count // 10)),
    )
    backend.close()


def _queued(target: Target, call: Callable[[], object], count: int) -> Results:
    """Microseconds of the CPU until a call returns, and until the device has done its work."""
    call()
    target.device.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    returned = time.perf_counter()
    target.device.synchronize()
    done = time.perf_counter()
    return {"cpu_us": 1e6 * (returned - started) / count, "us": 1e6 * (done - started) / count}


def _graph(target: Target, launch: Callable[[], None], count: int) -> Results:
    """Microseconds a launch in a graph of `count`, and of the CPU to launch the graph."""
    launch()
    target.device.synchronize()

    def launches() -> None:
        for _ in range(count):
            launch()

    replay = target.device.capture(launches)
    replay()
    timing = time_replays(target.seconds, replay, 0.1, count, fewest=2)
    whole = _queued(target, replay, 10)
    return {"us": 1e6 * timing.median, "graph_cpu_us": whole["cpu_us"], "graph_us": whole["us"]}


def _ops(backend: CudaBackend, sizes: Sizes) -> dict[str, Callable[[], None]]:
    """An op of each way of launching: CUDA C++, Numba, and a matmul with its choice of tile."""
    hidden = sizes.model.hidden_size
    rows = sizes.step_batches[0]

    def act(columns: int) -> Any:
        return backend.empty((rows, columns), backend.activation_dtype)

    residual = backend.upload(np.zeros((rows, hidden), np.float32))
    weight = backend.upload(np.ones(hidden, np.float32))
    linear = backend.pack_linear(np.zeros((hidden, hidden), np.float32), None)
    out, x, halves = act(hidden), act(hidden), act(2 * hidden)
    return {
        "rms_norm": lambda: backend.rms_norm(out, residual, weight, 1e-5),
        "silu_and_mul": lambda: backend.silu_and_mul(out, halves),
        "linear": lambda: backend.linear(out, x, linear),
    }
