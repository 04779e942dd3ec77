"""Times of the matmul at a model's shapes, beside the copy bandwidth and cuBLAS."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu.peers import Cublas
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target, fill
from bench.gpu.timing import Work, cold_copies, copy_bandwidth, summarize, time_device
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.linear import PackedLinear, as_packed, bytes_moved, flops

_DTYPE = "bfloat16"
_COMPARED_ROWS = 8
_TOLERANCE = 2.0**-7


def time_matmuls(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Every product of the model, for each number of rows."""
    _, bandwidth = copy_bandwidth(target, sizes.copy_bytes, sizes.seconds)
    recorder.peaks["copy_gb_per_s"] = bandwidth / 1e9
    cublas = _cublas(target, recorder)
    model = sizes.model
    shapes = {**model.linears, "lm_head": (model.vocab_size, model.hidden_size)}
    backend = CudaBackend(target.device, dtype=_DTYPE)
    for name, (out_features, in_features) in shapes.items():
        count = cold_copies(target, 2 * out_features * in_features)
        weights = [random_linear(target, out_features, in_features) for _ in range(count)]
        for rows in sizes.matmul_rows:
            parameters = {
                "rows": rows,
                "in_features": in_features,
                "out_features": out_features,
                "dtype": _DTYPE,
                "copies": count,
            }
            product = _Product(
                target, backend, weights, rows, "float32" if name == "lm_head" else _DTYPE
            )
            known = None if target.is_simulated else bandwidth
            run = partial(product.measure, cublas, sizes.seconds, known)
            recorder.measure(f"matmul/{name}", parameters, run)
    backend.close()


def random_linear(target: Target, out_features: int, in_features: int) -> PackedLinear:
    """A weight of random numbers, small as a model's are, made on the device."""
    assert in_features % 8 == 0, f"{in_features=}"
    weight = target.device.empty((out_features, in_features), _DTYPE)
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    fill(target, weight, (values * np.float32(in_features**-0.5)).astype(ml_dtypes.bfloat16))
    bias = target.device.upload(np.zeros(out_features, np.float32))
    return as_packed(weight, bias, in_features=in_features)


class _Product:
    """One shape over several copies of its weight."""

    def __init__(
        self,
        target: Target,
        backend: CudaBackend,
        weights: list[PackedLinear],
        rows: int,
        out_dtype: str,
    ) -> None:
        self.target, self.backend, self.weights = target, backend, weights
        first = weights[0]
        x = np.random.default_rng(rows).standard_normal((rows, first.in_features), np.float32)
        self.x: Any = target.device.upload(x.astype(ml_dtypes.bfloat16))
        self.out, self.other = (
            target.device.empty((rows, first.out_features), out_dtype) for _ in range(2)
        )

    def measure(
        self, cublas: Cublas | None, seconds: float, copy_bytes_per_s: float | None
    ) -> Results:
        """Ours, and cuBLAS's time where that is there, over the same memory."""
        first = self.weights[0]
        shape = (self.x.shape[0], first.out_features, first.in_features)
        calls = [partial(self.backend.linear, self.out, self.x, w) for w in self.weights]
        timing = time_device(self.target, calls, seconds)
        work = Work(bytes_moved(*shape, out_itemsize=self.out.dtype.itemsize), flops(*shape))
        results = summarize(timing, work, copy_bytes_per_s)
        if cublas is None:
            return results
        theirs = [partial(cublas, self.other, self.x, w.weight) for w in self.weights]
        peer = time_device(self.target, theirs, seconds)
        calls[0]()
        theirs[0]()
        return {
            **results,
            "cublas_us": 1e6 * peer.median,
            "cublas_speed_share": peer.median / timing.median,
            "refcheck": self._compare(),
        }

    def _compare(self) -> str:
        """Whether both gave the same first rows, but for rounding; raises AssertionError."""
        ours, theirs = (
            self.backend.download(out[:_COMPARED_ROWS]).astype(np.float64)
            for out in (self.out, self.other)
        )
        error = abs(ours - theirs).max()
        assert error <= _TOLERANCE * abs(theirs).max(), f"{error=} {abs(theirs).max()=}"
        return "passed"


def _cublas(target: Target, recorder: Recorder) -> Cublas | None:
    if target.is_simulated:
        recorder.skip("matmul/cublas", "there is no GPU")
        return None
    try:
        return Cublas(target.device)
    except ImportError as error:
        recorder.skip("matmul/cublas", f"cuBLAS is not installed: {error}")
        return None
