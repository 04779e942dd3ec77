"""Memory that several threads watch at once, and calls through addresses: LLVM IR for njit code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_WORD_BYTES = 8


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, and everything that was written before it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", _WORD_BYTES)

    return types.int64(types.intp), generate


@intrinsic
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64, after everything that was written before; later loads may go before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", _WORD_BYTES)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic
def add_word(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to an int64; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def replace_word(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write `value` if `expected` is there; whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0])
        done = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(done, 1)

    return types.boolean(types.intp, types.int64, types.int64), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Let the processor's other thread run, where there is an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if builder.module.triple.startswith("x86_64"):
            function_type = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            known = builder.module.globals.get(name)
            builder.call(known or ir.Function(builder.module, function_type, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call_entry(typingctx: Any, entry: Any, arguments: Any, start: Any, stop: Any) -> Any:
    """Call the C function void(int64 arguments, int64 start, int64 stop) at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [_I64] * 3)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        builder.call(function, args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


