"""What the processors can do at most: bytes read from memory and fused multiply-adds a second.

Peaks are measured, in the same run and with the same threads as the ops that are held against
them, since neither a data sheet nor another day's number fits a shared machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bench.machine import last_level_cache_bytes
from rawpaged.cpu.compiling import Kernel, kernel
from rawpaged.cpu.threads import ThreadTeam

_CHAINS = 10
"""Independent sums: enough for two units of four to five cycles, and few enough for AVX2."""

_LANES = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
_PASSES = 7
_CHAIN_LENGTH = 2_000_000
_I64, _F32 = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, _LANES)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Best of a few passes, with all threads of a team."""

    read_bytes_per_s: float
    flops_per_s: float


def measure_peaks(num_threads: int) -> Peaks:
    """Takes about a second, and memory of four times the last-level cache."""
    team = ThreadTeam(num_threads)
    try:
        return Peaks(_read_bandwidth(team), _fma_rate(team))
    finally:
        team.close()


def _type_fma_chains(typingctx: Any, address: Any, count: Any) -> Any:
    """sum[i] = sum[i] * x + y, `count` times; at `address` lie x, y and the sums."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, rounds = args

        def place(index: int) -> Any:
            address = builder.add(base, _I64(4 * _LANES * index))
            return builder.inttoptr(address, _VECTOR.as_pointer())

        def load(index: int) -> Any:
            value = builder.load(place(index))
            value.align = 4
            return value

        x, y, *first = (load(index) for index in range(_CHAINS + 2))
        before = builder.block
        body, end = builder.append_basic_block("fma"), builder.append_basic_block("end")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(_I64)
        sums = [builder.phi(_VECTOR) for _ in first]
        fma = ir.Function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{_LANES}f32"
        )
        after = [builder.call(fma, [value, x, y]) for value in sums]
        next_index = builder.add(index, _I64(1))
        builder.cbranch(builder.icmp_signed("<", next_index, rounds), body, end)
        ends = zip([index, *sums], [_I64(0), *first], [next_index, *after], strict=True)
        for phi, start, new in ends:
            phi.add_incoming(start, before)
            phi.add_incoming(new, body)
        builder.position_at_end(end)
        for i, value in enumerate(after):
            builder.store(value, place(i + 2)).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


_fma_chains: Any = intrinsic(_type_fma_chains)


@kernel
def _run_chains(buffers, count, start, stop):  # type: ignore[no-untyped-def]
    for row in range(start, stop):
        _fma_chains(buffers[row].ctypes.data, count)


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


def _fma_rate(team: ThreadTeam) -> float:
    buffers = np.ones((team.num_threads, (_CHAINS + 2) * _LANES), np.float32)
    # Half of the sum plus 1 tends to 2: neither denormal nor infinite. Sums that began alike
    # would be one to the compiler.
    buffers[:, :_LANES] = 0.5
    buffers[:, 2 * _LANES :] = np.repeat(np.arange(_CHAINS), _LANES)
    seconds = _best_pass(team, _run_chains, team.num_threads, buffers, _CHAIN_LENGTH)
    return 2 * _LANES * _CHAINS * _CHAIN_LENGTH * team.num_threads / seconds


def _best_pass(team: ThreadTeam, kernel: Kernel, count: int, *arguments: Any) -> float:
    team.run(kernel, 1, *arguments)  # compiles
    durations = []
    for _ in range(_PASSES):
        started = time.perf_counter()
        team.run(kernel, count, *arguments)
        durations.append(time.perf_counter() - started)
    return min(durations)
