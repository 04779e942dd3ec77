"""Passes over a row of logits in blocks of BLOCK, written as LLVM IR."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.vector_ir import LANES, V16F, VectorBuilder, larger

BLOCK = 128
"""Logits in a block."""
LOWEST_POWER = -126.0
"""Weights below two to this are zero."""

_VECTORS = BLOCK // LANES


@intrinsic
def block_maximum(typingctx: Any, logits: Any) -> Any:
    """The largest of the BLOCK floats at an address, NaN left out; -inf if there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        build = VectorBuilder(builder, fused=FEATURES.fma)
        most = build.float_constant(float("-inf"))
        for j in range(_VECTORS):
            most = larger(builder, build.load(args[0], V16F, 64 * j, align=4), most)
        return build.fold(most, larger)

    return types.float32(types.intp), generate


@intrinsic
def block_weights(typingctx: Any, weights: Any, logits: Any, most: Any, scale: Any) -> Any:
    """weights = 2 ** ((logits - most) * scale) for the BLOCK floats at two addresses; their sum.

    Within 2 ulp of the power of the rounded product. NaN, and what is below 2 ** LOWEST_POWER,
    has weight 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, logits, most, scale = args
        build = VectorBuilder(builder, fused=FEATURES.fma)
        every_most, every_scale = build.broadcast(most), build.broadcast(scale)
        total = build.zeros()
        for j in range(_VECTORS):
            logit = build.load(logits, V16F, 64 * j, align=4)
            power = builder.fmul(builder.fsub(logit, every_most), every_scale)
            counts = builder.fcmp_ordered(">=", power, build.float_constant(LOWEST_POWER))
            weight = build.power_of_two(builder.select(counts, power, build.zeros()))
            weight = builder.select(counts, weight, build.zeros())
            build.store(weight, weights, 64 * j, align=4)
            total = builder.fadd(total, weight)
        return build.fold(total, ir.IRBuilder.fadd)

    float32 = types.float32
    return float32(types.intp, types.intp, float32, float32), generate
