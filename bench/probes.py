"""What the processors can do at most: bytes read from memory and products a second.

Peaks are measured, in the same run and with the same threads as the ops that are held against
them, since neither a data sheet nor another day's number fits a shared machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bench.machine import last_level_cache_bytes
from rawpaged.cpu.compiling import Kernel, kernel
from rawpaged.cpu.features import FEATURES
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.cpu.vector_ir import F32, I32, VectorBuilder

Product = Literal["multiply_add", "bfloat16_dot", "byte_dot"]
"""What a kernel multiplies with: float32, pairs of bfloat16 (AVX512-BF16) or bytes (VNNI)."""

CHAINS = 10
"""Independent sums: enough for two units of four to five cycles, and few enough for AVX2."""

_LEAST_PASSES = 7
_SECONDS = 0.4
"""Of passes of a few milliseconds: on a shared machine all of a shorter time may be disturbed."""
_CHAIN_LENGTH = 2_000_000
_FLOPS_OF_LANE: dict[Product, int] = {"multiply_add": 2, "bfloat16_dot": 4, "byte_dot": 8}


@dataclass(frozen=True, slots=True)
class Peaks:
    """Best of a few passes, with all threads of a team."""

    read_bytes_per_s: float
    flops_per_s: Mapping[Product, float]
    """Of the products that the processor has and kernels may use."""


def known_products() -> list[Product]:
    """What the processor has, as far as kernels may use it."""
    has: dict[Product, bool] = {
        "multiply_add": True,
        "bfloat16_dot": FEATURES.avx512_bf16,
        "byte_dot": FEATURES.avx512_vnni,
    }
    return [product for product, there in has.items() if there]


def measure_peaks(num_threads: int) -> Peaks:
    """Takes about two seconds, and memory of four times the last-level cache."""
    team = ThreadTeam(num_threads)
    try:
        rates = {product: _rate(team, product) for product in known_products()}
        return Peaks(_read_bandwidth(team), rates)
    finally:
        team.close()


def lanes_of(product: Product) -> int:
    """Elements of a vector of sums."""
    return 16 if FEATURES.avx512f or product != "multiply_add" else 8


@cache
def chain_kernel(product: Product) -> Kernel:
    """A kernel(buffers, count): in each row of buffers f32[n, CHAINS + 2, lanes] lie x, y and sums.

    Of multiply_add sum = sum * x + y, of dots sum += x . y, `count` times each.
    """
    lanes = lanes_of(product)
    vector = ir.VectorType(I32 if product == "byte_dot" else F32, lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, rounds = args
        build = VectorBuilder(builder, fused=True)
        x, y, *first = (build.load(base, vector, 4 * lanes * i, align=4) for i in range(CHAINS + 2))

        def add(total: Any) -> Any:
            if product == "multiply_add":
                return build.call(f"llvm.fma.v{lanes}f32", vector, total, x, y)
            dot = build.bfloat16_dot if product == "bfloat16_dot" else build.byte_dot
            return dot(total, x, y)

        after = build.loop(rounds, first, lambda _, sums: [add(total) for total in sums])
        for i, total in enumerate(after):
            build.store(total, base, 4 * lanes * (i + 2), align=4)
        return context.get_dummy_value()

    run_chains: Any = intrinsic(
        lambda typingctx, address, count: (types.void(types.intp, types.intp), generate)
    )

    def chains(buffers, count, start, stop):  # type: ignore[no-untyped-def]
        for row in range(start, stop):
            run_chains(buffers[row].ctypes.data, count)

    return Kernel(chains, variant=product)


@kernel
def _read(buffer, total_read, start, stop):  # type: ignore[no-untyped-def]
    # Integers, because their sum may be split over vectors; that of floats may not. And a slice,
    # because indices that could be negative keep the loop from being vectorised.
    part = buffer[start:stop]
    total = np.uint64(0)
    for i in range(len(part)):
        total += part[i]
    # A sum that goes nowhere would not be computed. Threads may lose each other's.
    total_read[0] += total


def _read_bandwidth(team: ThreadTeam) -> float:
    # Written once, or the system would map all of it to one page of zeros.
    buffer = np.ones(4 * last_level_cache_bytes() // 8, np.uint64)
    seconds = _best_pass(team, _read, len(buffer), buffer, np.zeros(1, np.uint64))
    return float(buffer.nbytes / seconds)


def _rate(team: ThreadTeam, product: Product) -> float:
    lanes = lanes_of(product)
    buffers = np.ones((team.num_threads, CHAINS + 2, lanes), np.float32)
    # Half of the sum plus 1 tends to 2: neither denormal nor infinite; the dots are 0. Sums that
    # began alike would be one to the compiler.
    buffers[:, 0] = 0.5 if product == "multiply_add" else 0.0
    buffers[:, 2:] = np.arange(CHAINS)[:, None]
    count = team.num_threads
    seconds = _best_pass(team, chain_kernel(product), count, buffers, _CHAIN_LENGTH)
    return _FLOPS_OF_LANE[product] * lanes * CHAINS * _CHAIN_LENGTH * count / seconds


def _best_pass(team: ThreadTeam, kernel: Kernel, count: int, *arguments: Any) -> float:
    team.run(kernel, 1, *arguments)  # compiles
    durations: list[float] = []
    while len(durations) < _LEAST_PASSES or sum(durations) < _SECONDS:
        started = time.perf_counter()
        team.run(kernel, count, *arguments)
        durations.append(time.perf_counter() - started)
    return min(durations)
