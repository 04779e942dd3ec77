"""Arguments of kernels as 64-bit words, so that a call can be written down now and made later.

    array     address, shape, strides in bytes
    Rows      address, number of rows, columns, stride in bytes
    integer   itself
    float     its bits; a float32 in the lower half

`encode` writes them and says of what kinds they are; `make_loader` is the compiled counterpart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj
from numba.np.numpy_support import from_dtype

# Untyped, or typed in a way that calls like these do not fit.
_numba: Any = types
_populate_array: Any = arrayobj.populate_array
_pack_array: Any = cgutils.pack_array

Kind = tuple[str, int, str]
"""dtype character, dimensions, and "C", "A" (any strides), "rows" or "scalar"."""


class Rows(NamedTuple):
    """A matrix whose rows are contiguous, as kernels see it: one type, whatever the stride."""

    address: int
    num_rows: int
    columns: int
    stride: int


class RowsOf(NamedTuple):
    """An argument to be passed as Rows: the axes after the first count as one."""

    array: npt.NDArray[Any]


def encode(args: Sequence[Any]) -> tuple[tuple[Kind, ...], list[int]]:
    """Kinds of the arguments and their words."""
    kinds: list[Kind] = []
    words: list[int] = []
    for value in args:
        if isinstance(value, np.ndarray):
            layout = "C" if value.flags.c_contiguous else "A"
            kinds.append((value.dtype.char, value.ndim, layout))
            words.append(address_of(value))
            words.extend(value.shape)
            words.extend(value.strides)
        elif isinstance(value, RowsOf):
            kinds.append(("q", 2, "rows"))
            words.extend(_rows(value.array))
        elif isinstance(value, np.float32):
            kinds.append(("f", 0, "scalar"))
            words.append(struct.unpack("<i", struct.pack("<f", value))[0])
        elif isinstance(value, float):
            kinds.append(("d", 0, "scalar"))
            words.append(struct.unpack("<q", struct.pack("<d", value))[0])
        else:
            kinds.append(("q", 0, "scalar"))
            words.append(int(value))
    return tuple(kinds), words


def places_of_num_rows(kinds: Sequence[Kind]) -> list[int]:
    """Which of the words of arguments of these kinds are numbers of Rows' rows."""
    places = []
    first = 0
    for _, dimensions, layout in kinds:
        if layout == "rows":
            places.append(first + Rows._fields.index("num_rows"))
            first += len(Rows._fields)
        else:
            first += 1 + 2 * dimensions
    return places


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of the first element."""
    return int(array.__array_interface__["data"][0])


def owner_of(value: Any) -> Any:
    """What keeps the memory behind an argument; None for numbers."""
    array = value.array if isinstance(value, RowsOf) else value
    if not isinstance(array, np.ndarray):
        return None
    return array if array.base is None else array.base


def _rows(array: npt.NDArray[Any]) -> tuple[int, ...]:
    columns = 1
    step = array.itemsize
    for size, stride in zip(array.shape[:0:-1], array.strides[:0:-1], strict=True):
        assert size == 1 or stride == step, f"rows are not contiguous: {array.strides=}"
        columns *= size
        step *= size
    return address_of(array), len(array), columns, array.strides[0]


def numba_type(kind: Kind) -> Any:
    """The type that a kernel's parameter has for an argument of this kind."""
    char, dimensions, layout = kind
    if layout == "rows":
        return _numba.NamedUniTuple(types.int64, len(Rows._fields), Rows)
    element = from_dtype(np.dtype(char))
    return element if layout == "scalar" else _numba.Array(element, dimensions, layout)


def make_loader(kinds: Sequence[Kind]) -> Callable[..., Any]:
    """An intrinsic load(address, start, stop) -> (*arguments, start, stop), for njit code."""
    argument_types = [numba_type(kind) for kind in kinds]
    result = _numba.Tuple([*argument_types, types.int64, types.int64])

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _WordReader(builder, args[0])
        values = [_load(context, builder, type_, words) for type_ in argument_types]
        return context.make_tuple(builder, result, [*values, *args[1:]])

    def typer(typingctx: Any, address: Any, start: Any, stop: Any) -> Any:
        return result(types.int64, types.int64, types.int64), generate

    loader: Callable[..., Any] = intrinsic(typer)
    return loader


class _WordReader:
    """Reads one word after the other."""

    def __init__(self, builder: Any, address: Any) -> None:
        self._builder = builder
        self._pointer = builder.inttoptr(address, ir.IntType(64).as_pointer())
        self._index = 0

    def next(self) -> Any:
        word = self._builder.load(
            self._builder.gep(self._pointer, [ir.Constant(ir.IntType(32), self._index)])
        )
        self._index += 1
        return word


def _load(context: Any, builder: Any, type_: Any, words: _WordReader) -> Any:
    """One argument as a value of its type."""
    if isinstance(type_, types.Array):
        array = context.make_array(type_)(context, builder)
        data = builder.inttoptr(words.next(), array.data.type)
        shape = [words.next() for _ in range(type_.ndim)]
        strides = [words.next() for _ in range(type_.ndim)]
        itemsize = context.get_constant(
            types.intp, context.get_abi_sizeof(context.get_data_type(type_.dtype))
        )
        word = ir.IntType(64)
        _populate_array(
            array,
            data=data,
            shape=_pack_array(builder, shape, ty=word),
            strides=_pack_array(builder, strides, ty=word),
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()
    if isinstance(type_, types.NamedUniTuple):
        return context.make_tuple(builder, type_, [words.next() for _ in Rows._fields])
    word = words.next()
    if type_ == types.float64:
        return builder.bitcast(word, ir.DoubleType())
    if type_ == types.float32:
        return builder.bitcast(builder.trunc(word, ir.IntType(32)), ir.FloatType())
    return word
