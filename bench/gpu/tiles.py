"""Times of tiles that gpu/tuned.py might choose: its choices are reasoned, not measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu.matmul import random_linear
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target
from bench.gpu.timing import Work, cold_copies, copy_bandwidth, summarize, time_device
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.linear import Linear, PackedLinear, bytes_moved, flops, workspace_size
from rawpaged.gpu.linear_kernels import MOST_SLICES, Epilogue, Mode
from rawpaged.gpu.tuned import ANY_ROWS, FewRowsTile, GemmTile, LinearTile

_DTYPE = "bfloat16"


def time_tiles(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Two products of the model by each tile that fits, which also have to give equal bits."""
    _, bandwidth = copy_bandwidth(target, sizes.copy_bytes, sizes.seconds)
    recorder.peaks["copy_gb_per_s"] = bandwidth / 1e9
    backend = CudaBackend(target.device, dtype=_DTYPE)
    linears = {tile: _linear(target, tile) for tile in fitting(target, sizes.tiles)}
    for name in ("o", "gate_up, silu"):
        out_features, in_features = sizes.model.linears[name]
        count = cold_copies(target, 2 * out_features * in_features)
        weights = [random_linear(target, out_features, in_features) for _ in range(count)]
        for rows in sizes.tile_rows:
            product = _Product(target, backend, weights, rows)
            for tile in tiles_of(rows, tuple(linears)):
                known = None if target.is_simulated else bandwidth
                run = partial(product.measure, linears[tile], sizes.seconds, known)
                parameters = {"rows": rows, "weight": weights[0].weight.shape, "tile": repr(tile)}
                recorder.measure(f"tiles/{name}", parameters, run)
    backend.close()


def fitting(target: Target, tiles: Sequence[LinearTile]) -> list[LinearTile]:
    """Tiles whose shared memory a block may have."""
    return [tile for tile in tiles if _shared_bytes(tile) <= target.block_shared_bytes]


def tiles_of(rows: int, tiles: Sequence[LinearTile]) -> list[LinearTile]:
    """Those for so many rows: of the few-row kernels the smallest that holds them, else all."""
    few = [tile for tile in tiles if isinstance(tile, FewRowsTile) and rows <= tile.rows]
    if few:
        least = min(tile.rows for tile in few)
        return [tile for tile in few if tile.rows == least]
    return [tile for tile in tiles if isinstance(tile, GemmTile)]


class _Product:
    """One shape over copies of its weight, and what the table's tile gives for it."""

    def __init__(
        self, target: Target, backend: CudaBackend, weights: list[PackedLinear], rows: int
    ) -> None:
        self._target, self._backend, self._weights = target, backend, weights
        first = weights[0]
        x = np.random.default_rng(rows).standard_normal((rows, first.in_features), np.float32)
        self._x: Any = target.device.upload(x.astype(ml_dtypes.bfloat16))
        self._out = target.device.empty((rows, first.out_features), _DTYPE)
        backend.linear(self._out, self._x, first)
        self._expected = backend.download(self._out).tobytes()

    def measure(self, linear: Linear, seconds: float, copy_bytes_per_s: float | None) -> Results:
        """Raises AssertionError where bits differ from those of the table's tile."""
        linear(self._out, self._x, self._weights[0])
        found = self._backend.download(self._out).tobytes()
        assert found == self._expected, "bits differ from those of another tile"
        calls = [partial(linear, self._out, self._x, weight) for weight in self._weights]
        timing = time_device(self._target, calls, seconds)
        first = self._weights[0]
        shape = (self._x.shape[0], first.out_features, first.in_features)
        return summarize(timing, Work(bytes_moved(*shape), flops(*shape)), copy_bytes_per_s)


def _linear(target: Target, tile: LinearTile) -> Linear:
    """With a workspace, so that products of few tiles are split as in use."""
    device, tiles = target.device, {ANY_ROWS: tile}
    size = workspace_size(device.num_multiprocessors, tiles)
    return Linear(
        device.loader,
        dtype=_DTYPE,
        tiles=tiles,
        modes=(Mode(Epilogue.STORE, _DTYPE),),
        num_sms=device.num_multiprocessors,
        workspace=device.empty((max(size, 1),), "float32"),
    )


def _shared_bytes(tile: LinearTile) -> int:
    if isinstance(tile, FewRowsTile):
        return tile.shared_bytes(MOST_SLICES)
    return tile.shared_bytes
