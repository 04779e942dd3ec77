"""How many blocks of a kernel an SM runs at a time, from what they take.

Limits are those of the CUDA C++ programming guide's table of compute capabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65536
_WARP_REGISTERS = 256
"""Registers go to warps in units of so many: 8 a thread."""
_SUB_CORES = 4
"""Of an SM; the warps of a block are shared out over them, each has a quarter of the registers."""
_RESERVED_SHARED = 1024
_SHARED_UNIT = 128


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What an SM holds."""

    threads: int
    blocks: int
    shared_bytes: int
    most_shared_bytes: int
    """Of a block, when it asks for that."""


MULTIPROCESSORS = {
    80: Multiprocessor(2048, 32, 164 * 1024, 163 * 1024),
    86: Multiprocessor(1536, 16, 100 * 1024, 99 * 1024),
    89: Multiprocessor(1536, 24, 100 * 1024, 99 * 1024),
    90: Multiprocessor(2048, 32, 228 * 1024, 227 * 1024),
    100: Multiprocessor(2048, 32, 228 * 1024, 227 * 1024),
    120: Multiprocessor(1536, 24, 100 * 1024, 99 * 1024),
}
"""By compute capability, 90 for 9.0."""


def blocks_per_sm(sm: int, *, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of `threads` that run side by side; 0 where not even one can be launched.

    `registers` a thread; `shared_bytes` a block, static and dynamic together.
    """
    limits = MULTIPROCESSORS[sm]
    if shared_bytes > limits.most_shared_bytes:
        return 0
    warps = -(-threads // 32)
    warp_registers = -(-32 * registers // _WARP_REGISTERS) * _WARP_REGISTERS
    warps_by_registers = _REGISTERS // _SUB_CORES // warp_registers * _SUB_CORES
    shared = -(-(shared_bytes + _RESERVED_SHARED) // _SHARED_UNIT) * _SHARED_UNIT
    return min(
        limits.blocks,
        limits.threads // (32 * warps),
        warps_by_registers // warps,
        limits.shared_bytes // shared,
    )
