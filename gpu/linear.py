"""Linear layers on the GPU: launches gpu/kernels/gemm.cu and gpu/kernels/gemv.cu.

An element's bits depend on its row of x and its row of the weight, not on the number of rows or on
the tile: all kernels that sum on tensor cores add in the order that gemm.cu states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.gpu.arrays import ArrayInfo, array_info, check, has_contiguous_axes
from rawpaged.gpu.launch import Launch, Operand, PreparedLaunches, layout_of
from rawpaged.gpu.linear_kernels import (
    GEMV_ROWS,
    GEMV_THREADS,
    MOST_SLICES,
    REDUCE_THREADS,
    Epilogue,
    KernelKey,
    Mode,
    gemv_columns,
    instance_of,
    kernel_keys,
    slice_key,
    slice_length,
)
from rawpaged.gpu.module import Instance, Kernel, Loader, load_kernels
from rawpaged.gpu.tuned import FewRowsTile, GemmTile, LinearTile

_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_CHUNK = 8
"""Elements of one 16-byte load; rows of x and weight begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """W [out_features, in_features] and its bias on the device.

    `weight[:out_features, :in_features]` is W; columns up to the next multiple of 8 are zeros.
    Made by `pack`, so that a launch need not look at the arrays again.
    """

    weight: Any  # T [out_features, padded_in_features], contiguous
    bias: Any  # f32[out_features], zeros where there is none
    dtype: str
    out_features: int
    in_features: int
    padded_in_features: int

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes) + int(self.bias.nbytes)

    @property
    def row_types(self) -> tuple[tuple[str | None, int], ...]:
        return ((None, self.out_features),)


def pack(
    weight: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    *,
    dtype: str,
    to_device: Callable[[npt.NDArray[Any]], Any],
) -> PackedLinear:
    """Copy float weight [out_features, in_features], rounded to nearest even, to the device."""
    out_features, in_features = weight.shape
    padded = -(-in_features // _CHUNK) * _CHUNK
    rounded = np.ascontiguousarray(weight, _DTYPES[dtype])
    if padded != in_features:
        rounded = np.pad(rounded, ((0, 0), (0, padded - in_features)))
    full_bias = np.zeros(out_features, np.float32) if bias is None else bias
    return as_packed(
        to_device(rounded),
        to_device(np.ascontiguousarray(full_bias, np.float32)),
        in_features=in_features,
    )


def as_packed(weight: Any, bias: Any, *, in_features: int) -> PackedLinear:
    """What `pack` returns of arrays that are on the device: see PackedLinear.

    Raises ValueError for arrays that are not so.
    """
    info, bias_info = array_info(weight), array_info(bias)
    check(
        info.dtype in _DTYPES
        and len(info.shape) == 2
        and 0 <= info.shape[1] - in_features < _CHUNK
        and info.is_contiguous
        and _begins_at_chunks(info)
        and (bias_info.dtype, bias_info.shape) == ("float32", info.shape[:1])
        and bias_info.is_contiguous,
        weight=weight,
        bias=bias,
    )
    return PackedLinear(weight, bias, info.dtype, info.shape[0], in_features, info.shape[1])


def flops(rows: int, out_features: int, in_features: int) -> int:
    """Of a product, a multiply-add counted as two."""
    return 2 * rows * out_features * in_features


def bytes_moved(
    rows: int,
    out_features: int,
    in_features: int,
    *,
    epilogue: Epilogue = Epilogue.STORE,
    out_itemsize: int = 2,
) -> int:
    """The least bytes a product reads and writes: weight, bias and x once, out once or twice."""
    columns = out_features // Mode(epilogue, "float32").halves
    out = rows * columns * out_itemsize * (2 if epilogue is Epilogue.ADD else 1)
    return 2 * (out_features + rows) * in_features + 4 * out_features + out


def workspace_size(num_sms: int, tiles: Mapping[int, LinearTile]) -> int:
    """float32 elements with which any product that profits from it can be split."""
    areas = [tile.rows * tile.columns for tile in tiles.values() if isinstance(tile, GemmTile)]
    return MOST_SLICES * (num_sms // 2) * max(areas, default=0)


def is_worth_splitting(ctas: int, slices: int, num_sms: int) -> bool:
    """Whether a product of that many tiles leaves half of the SMs idle and has slices to share."""
    return slices > 1 and 2 * ctas <= num_sms


_OUT, _X, _WEIGHT, _BIAS, _WORKSPACE = (Operand(index) for index in range(5))


@dataclass(frozen=True, slots=True)
class _Product:
    """The numbers of one call, checked; its launches are over (out, x, W, bias, workspace)."""

    mode: Mode
    x_stride: int
    out_stride: int
    rows: int
    out_features: int
    depth: int
    """K as the kernels take it, padding included."""

    @property
    def operands(self) -> tuple[Operand | int, ...]:
        return _X, self.x_stride, _WEIGHT

    @property
    def result(self) -> tuple[Operand | int, ...]:
        return _BIAS, _OUT, self.out_stride, self.rows, self.out_features

    @property
    def slices(self) -> int:
        return -(-self.depth // slice_length(self.depth))

    @property
    def columns(self) -> int:
        return self.out_features // self.mode.halves


class Linear:
    """out = epilogue(x @ W.T + bias) for x and W of one type, sums in float32.

    `tiles` are those of `tuned.linear_tiles`. `workspace` f32[n] lets products of few tiles be
    split over more CTAs; a product for which it is too small is not split, with the same bits.
    With batch_invariant=False up to four rows may be summed in another order.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        dtype: str,
        tiles: Mapping[int, LinearTile],
        modes: Sequence[Mode],
        num_sms: int,
        workspace: Any,
        batch_invariant: bool = True,
    ) -> None:
        self.dtype = dtype
        self._modes = frozenset(modes)
        self._tiles = tuple(sorted(tiles.items()))
        self._num_sms = num_sms
        self._workspace = workspace
        self._workspace_size = array_info(workspace).shape[0]
        self._batch_invariant = batch_invariant
        self._launches = PreparedLaunches()
        keys = kernel_keys(tiles.values(), modes, with_gemv=not batch_invariant)
        self._kernels = _load(loader, {key: instance_of(dtype, key) for key in keys})

    def __call__(
        self, out: Any, x: Any, weight: PackedLinear, epilogue: Epilogue = Epilogue.STORE
    ) -> None:
        """out [n, columns] from x T[n, in_features]; see Epilogue.

        x has as many columns as `weight.weight`, padding included, and rows that begin at
        multiples of 16 bytes; out is of a declared mode's dtype, of any row stride, apart from
        x. columns is out_features, or half of that with SILU_MUL. Raises ValueError otherwise.
        """
        to, source = array_info(out), array_info(x)
        shape = (weight.out_features, weight.padded_in_features, weight.dtype)
        key = (epilogue, layout_of(to), layout_of(source), shape)
        launches = self._launches.get(key)
        if launches is None:
            mode = self._checked_mode(out, x, weight, epilogue)
            product = _Product(mode, source.strides[0], to.strides[0], source.shape[0], *shape[:2])
            launches = self._launches.put(key, self._prepare(product))
        for launch in launches:
            launch((out, x, weight.weight, weight.bias, self._workspace))

    def _checked_mode(self, out: Any, x: Any, weight: PackedLinear, epilogue: Epilogue) -> Mode:
        to, source = array_info(out), array_info(x)
        mode = Mode(epilogue, to.dtype)
        if mode not in self._modes:
            raise ValueError(f"{mode} was not declared; there are {sorted(map(str, self._modes))}")
        columns, odd = divmod(weight.out_features, mode.halves)
        check(
            _has_rows(to)
            and _has_rows(source)
            and source.dtype == weight.dtype == self.dtype
            and _begins_at_chunks(source)
            and source.shape[1] == weight.padded_in_features
            and to.shape == (source.shape[0], columns)
            and not odd,
            out=out,
            x=x,
            weight=weight.weight,
        )
        return mode

    def _prepare(self, product: _Product) -> tuple[Launch, ...]:
        """The kernel or kernels that compute a product."""
        if product.rows == 0:
            return ()
        if product.rows <= GEMV_ROWS[-1] and not self._batch_invariant:
            return (self._gemv(product),)
        tile = next((tile for most, tile in self._tiles if product.rows <= most), None)
        if tile is None:
            raise ValueError(f"{product.rows} rows: no tile for more than {self._tiles[-1][0]}")
        if isinstance(tile, FewRowsTile):
            return (self._few_rows(product, tile),)
        width = workspace_width(product.out_features, product.mode)
        ctas = -(-product.rows // tile.rows) * -(-width // tile.columns)
        fits = product.slices * product.rows * width <= self._workspace_size
        if fits and is_worth_splitting(ctas, product.slices, self._num_sms):
            return self._split_gemm(product, tile, ctas)
        return (self._gemm(product, tile, ctas),)

    def _gemv(self, product: _Product) -> Launch:
        rows = next(rows for rows in GEMV_ROWS if product.rows <= rows)
        kernel = self._kernels[KernelKey("gemv", product.mode, rows)]
        columns = GEMV_THREADS // 32 * gemv_columns(product.mode)
        grid = (-(-product.columns // columns),)
        block = (GEMV_THREADS,)
        return kernel.prepare(grid, block, *product.operands, *product.result, product.depth)

    def _few_rows(self, product: _Product, tile: FewRowsTile) -> Launch:
        kernel = self._kernels[KernelKey("few_rows", product.mode, tile)]
        columns = 16 * tile.groups // product.mode.halves
        return kernel.prepare(
            (-(-product.columns // columns),),
            (32 * product.slices,),
            *product.operands,
            *product.result,
            product.depth,
            slice_length(product.depth),
            shared_mem=tile.shared_bytes(product.slices),
        )

    def _gemm(self, product: _Product, tile: GemmTile, ctas: int) -> Launch:
        kernel = self._kernels[KernelKey("gemm", product.mode, tile)]
        return kernel.prepare(
            (ctas,),
            (tile.threads,),
            *product.operands,
            *product.result,
            product.depth,
            slice_length(product.depth),
            shared_mem=tile.shared_bytes,
        )

    def _split_gemm(self, product: _Product, tile: GemmTile, ctas: int) -> tuple[Launch, Launch]:
        kernel = self._kernels[slice_key(tile, product.mode)]
        parts = kernel.prepare(
            (ctas, product.slices),
            (tile.threads,),
            *product.operands,
            _WORKSPACE,
            product.rows,
            product.out_features,
            product.depth,
            slice_length(product.depth),
            shared_mem=tile.shared_bytes,
        )
        reduce = self._kernels[KernelKey("gemm_reduce", product.mode)]
        grid = (-(-product.columns // (4 * REDUCE_THREADS)), product.rows)
        block = (REDUCE_THREADS,)
        return parts, reduce.prepare(grid, block, _WORKSPACE, *product.result, product.slices)


def workspace_width(out_features: int, mode: Mode) -> int:
    """Columns of the tile grid and of the workspace: whole groups of 16, gate and up in turn."""
    return -(-(out_features // mode.halves) // 16) * 16 * mode.halves


def _load(loader: Loader, instances: Mapping[KernelKey, Instance]) -> dict[KernelKey, Kernel]:
    """Compile each source file's kernels together."""
    kernels: dict[str, Kernel] = {}
    for source in sorted({instance.declaration.source for instance in instances.values()}):
        chosen = [one for one in instances.values() if one.declaration.source == source]
        kernels.update(load_kernels(loader, chosen))
    return {key: kernels[instance.name] for key, instance in instances.items()}


def _has_rows(info: ArrayInfo) -> bool:
    return len(info.shape) == 2 and has_contiguous_axes(info, 1)


def _begins_at_chunks(info: ArrayInfo) -> bool:
    """Whether each row begins at a multiple of 16 bytes."""
    return info.pointer % 16 == 0 and (info.shape[0] <= 1 or info.strides[0] % _CHUNK == 0)
