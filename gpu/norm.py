"""RMSNorm on the GPU: launches gpu/kernels/norm.cu."""

from __future__ import annotations

from typing import Any

from rawpaged.gpu.arrays import ArrayInfo, array_info, check, has_contiguous_axes
from rawpaged.gpu.launch import Launch, Operand, PreparedLaunches, layout_of
from rawpaged.gpu.module import (
    Instance,
    KernelDeclaration,
    Loader,
    instantiate,
    load_kernels,
)

C_TYPES = {"bfloat16": "bf16", "float16": "half"}
"""C names of the types that activations have, by NumPy's."""

_SOURCE = "norm.cu"
_RMS_NORM = KernelDeclaration(
    _SOURCE,
    "rms_norm",
    "T* out, const S* x, const float* weight, int num_rows, int heads, long long out_stride, "
    "long long x_stride, float eps",
)
_RMS_NORM_IN_PLACE = KernelDeclaration(
    _SOURCE,
    "rms_norm_in_place",
    "T* x, const float* weight, int num_rows, int heads, long long x_stride, float eps",
)
_ADD_RMS_NORM = KernelDeclaration(
    _SOURCE,
    "add_rms_norm",
    "T* out, const T* x, float* residual, const float* weight, int num_rows, float eps",
)

_MOST_THREADS = 512
_WARPS_A_BLOCK = 4
"""Rows of a block where a row is one warp's."""


def pack_size(size: int) -> int:
    """Neighbouring elements a thread takes at a time: as many as leave no lane of a warp idle."""
    return next((pack for pack in (8, 4, 2) if size % pack == 0 and size // pack >= 32), 1)


def threads_of_row(size: int) -> int:
    """Threads that share a row: whole warps, one pack a thread while that is few enough."""
    packs = size // pack_size(size)
    return min(-(-packs // 32) * 32, _MOST_THREADS)


def instances(dtype: str, size: int, *, one_plus: bool) -> tuple[Instance, ...]:
    """The four kernels of rows of `size` elements: from float32, from T, in place, after a sum."""
    name = C_TYPES[dtype]
    suffix = f"d{size}_plus1" if one_plus else f"d{size}"
    shape = (size, threads_of_row(size), pack_size(size), str(one_plus).lower())
    threads = max(threads_of_row(size), 32 * _WARPS_A_BLOCK)

    def instance(
        declaration: KernelDeclaration, label: str, *types: str, **mapping: str
    ) -> Instance:
        return instantiate(
            declaration,
            f"{declaration.function}_{label}_{suffix}",
            (*types, *shape),
            types=mapping,
            threads=threads,
        )

    return (
        instance(_RMS_NORM, f"f32_{name}", "float", name, S="float", T=name),
        instance(_RMS_NORM, name, name, name, S=name, T=name),
        instance(_RMS_NORM_IN_PLACE, name, name, T=name),
        instance(_ADD_RMS_NORM, name, name, T=name),
    )


class RmsNorm:
    """RMSNorm of rows of one size, with results of one type T (bfloat16 or float16).

    Weights are float32[size]; with `one_plus` they are stored less 1, as Gemma's are.
    """

    def __init__(self, loader: Loader, *, dtype: str, size: int, one_plus: bool = False) -> None:
        self.dtype = dtype
        self.size = size
        kernels = instances(dtype, size, one_plus=one_plus)
        loaded = load_kernels(loader, kernels)
        self._from_float, self._from_same, self._in_place, self._after_sum = (
            loaded[kernel.name] for kernel in kernels
        )
        threads = threads_of_row(size)
        self._block = (threads, _WARPS_A_BLOCK if threads == 32 else 1)
        self._launches = PreparedLaunches()

    def rms_norm(self, out: Any, x: Any, weight: Any, eps: float) -> None:
        """out T = x / rms(x) * weight over the last axis of x[n, size] or x[n, heads, size].

        x is float32 or T, and may be out itself but not overlap it otherwise. The last axes are
        contiguous; rows may be any number of whole packs apart.
        """
        to, source, scale = array_info(out), array_info(x), array_info(weight)
        in_place = to.pointer == source.pointer
        key = (in_place, layout_of(to), layout_of(source), layout_of(scale), eps)
        launches = self._launches.get(key)
        if launches is None:
            check(
                to.shape == source.shape
                and source.dtype in ("float32", self.dtype)
                and self._is_view(to, self.dtype)
                and self._is_view(source, source.dtype)
                and self._is_weight(scale)
                and not (in_place and to != source),
                out=out,
                x=x,
                weight=weight,
            )
            launches = self._launches.put(key, self._prepare_norm(to, source, in_place, eps))
        for launch in launches:
            launch((out, x, weight))

    def add_rms_norm(self, out: Any, x: Any, residual: Any, weight: Any, eps: float) -> None:
        """residual f32[n, size] += x T[n, size]; out T = residual / rms(residual) * weight.

        All three are contiguous, and none overlaps another.
        """
        infos = [array_info(array) for array in (out, x, residual, weight)]
        key = (*map(layout_of, infos), eps)
        launches = self._launches.get(key)
        fits = len({info.pointer for info in infos}) == 4
        if launches is None or not fits:
            check(fits and self._fit_sum(*infos), out=out, x=x, residual=residual, weight=weight)
            launches = self._launches.put(key, self._prepare_sum(infos[0].shape[0], eps))
        for launch in launches:
            launch((out, x, residual, weight))

    def _prepare_norm(
        self, to: ArrayInfo, source: ArrayInfo, in_place: bool, eps: float
    ) -> tuple[Launch, ...]:
        """Over (out, x, weight)."""
        out, x, weight = (Operand(i) for i in range(3))
        heads = source.shape[1] if len(source.shape) == 3 else 1
        num_rows = source.shape[0] * heads
        if num_rows == 0:
            return ()
        grid, rest = self._grid(num_rows), (num_rows, heads)
        if in_place:
            return (
                self._in_place.prepare(
                    grid, self._block, out, weight, *rest, source.strides[0], eps
                ),
            )
        kernel = self._from_float if source.dtype == "float32" else self._from_same
        strides = (to.strides[0], source.strides[0])
        return (kernel.prepare(grid, self._block, out, x, weight, *rest, *strides, eps),)

    def _prepare_sum(self, num_rows: int, eps: float) -> tuple[Launch, ...]:
        """Over (out, x, residual, weight)."""
        if num_rows == 0:
            return ()
        operands = (Operand(i) for i in range(4))
        grid = self._grid(num_rows)
        return (self._after_sum.prepare(grid, self._block, *operands, num_rows, eps),)

    def _fit_sum(
        self, out: ArrayInfo, x: ArrayInfo, residual: ArrayInfo, weight: ArrayInfo
    ) -> bool:
        rows = (out, x, residual)
        return (
            all(info.shape == out.shape and info.is_contiguous for info in rows)
            and len(out.shape) == 2
            and [info.dtype for info in rows] == [self.dtype, self.dtype, "float32"]
            and all(self._is_view(info, info.dtype) for info in rows)
            and self._is_weight(weight)
        )

    def _grid(self, num_rows: int) -> tuple[int, ...]:
        return (-(-num_rows // self._block[1]),)

    def _is_view(self, info: ArrayInfo, dtype: str) -> bool:
        """Whether rows of the right size and type begin where a whole pack may be read."""
        if info.dtype != dtype or len(info.shape) not in (2, 3) or info.shape[-1] != self.size:
            return False
        pack = min(pack_size(self.size) * info.itemsize, 16)
        return (
            has_contiguous_axes(info, len(info.shape) - 1)
            and info.pointer % pack == 0
            and (info.shape[0] <= 1 or info.strides[0] * info.itemsize % pack == 0)
        )

    def _is_weight(self, info: ArrayInfo) -> bool:
        pack = min(pack_size(self.size) * info.itemsize, 16)
        return (
            info.dtype == "float32"
            and info.shape == (self.size,)
            and info.is_contiguous
            and info.pointer % pack == 0
        )
