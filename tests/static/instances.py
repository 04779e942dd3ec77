"""Which kernels are compiled for which architecture, as the launchers make them.

For FULL_ARCHS all that a model may bring about. For the others, whose machine code differs little
from one of those, a part that has each function, both types, a cache of bytes, and all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rawpaged.gpu import attention, gather, kv_cache, norm, sampling
from rawpaged.gpu.kv_cache import HEAD_DIMS
from rawpaged.gpu.linear_kernels import Epilogue, Mode, instance_of, kernel_keys
from rawpaged.gpu.module import Instance
from rawpaged.gpu.tuned import linear_tiles

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
FULL_ARCHS = ("sm_80", "sm_90a")

_MODEL_HEADS = (64, 80, 96, 128, 256)
"""Head sizes of models in use; the smaller ones are those of tests."""
_GROUPS = (8, 16)
"""Query heads a KV head: one tile of 8 heads a block, and two where registers allow."""
_NORM_SIZES = ((128, False), (576, False), (3584, True), (4096, False), (8192, False))
"""(size, one_plus): heads, and rows of models from 135M to 70B; Gemma's add one."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Kernels of one source file that are compiled together for one architecture."""

    arch: str
    source: str
    instances: tuple[Instance, ...]

    @property
    def sm(self) -> int:
        return sm_of(self.arch)


def sm_of(arch: str) -> int:
    """Compute capability as in rawpaged.gpu.tuned: 90 for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("a"))


def units(arch: str) -> tuple[Unit, ...]:
    """What is compiled for `arch`; no kernel twice."""
    groups = (*_attention(arch), *_linear(arch), *_rows(arch))
    return tuple(_unit(arch, list(instances)) for instances in groups)


def _unit(arch: str, instances: Sequence[Instance]) -> Unit:
    by_name = {instance.name: instance for instance in instances}
    (source,) = {instance.declaration.source for instance in instances}
    return Unit(arch, source, tuple(by_name.values()))


def _caches(arch: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """dtype, cache_dtype and head sizes."""
    if arch in FULL_ARCHS:
        yield "bfloat16", "fp8_e4m3", _MODEL_HEADS
        yield "bfloat16", "int8", _MODEL_HEADS
        yield "bfloat16", "bfloat16", HEAD_DIMS
        yield "float16", "float16", HEAD_DIMS
        for cache_dtype in ("fp8_e4m3", "int8"):  # differ from bfloat16's in two conversions
            yield "float16", cache_dtype, (128,)
    else:
        yield "bfloat16", "bfloat16", _MODEL_HEADS
        yield "float16", "fp8_e4m3", (128,)


def _attention(arch: str) -> Iterator[Sequence[Instance]]:
    for dtype, cache_dtype, head_dims in _caches(arch):
        types = (dtype, cache_dtype)
        yield [attention.prefill_instance(*types, head_dim) for head_dim in head_dims]
        yield [
            instance
            for head_dim, group in product(head_dims, _GROUPS)
            for instance in attention.decode_instances(*types, head_dim, group)
        ]
    yield [
        kv_cache.store_instance(dtype, cache_dtype, head_dim)
        for dtype, cache_dtype, head_dims in _caches(arch)
        for head_dim in head_dims
    ]


def _linear(arch: str) -> Iterator[Sequence[Instance]]:
    tiles = tuple(linear_tiles(sm_of(arch)).values())
    for dtype in ("bfloat16", "float16"):
        modes = [
            Mode(Epilogue.STORE, dtype),
            Mode(Epilogue.STORE, "float32"),
            Mode(Epilogue.ADD, "float32"),
            Mode(Epilogue.SILU_MUL, dtype),
        ]
        if arch not in FULL_ARCHS:
            modes = modes[3:] if dtype == "bfloat16" else modes[:1]
        keys = kernel_keys(tiles, modes, with_gemv=True)
        instances = [instance_of(dtype, key) for key in keys]
        for source in ("gemm.cu", "gemv.cu"):
            yield [one for one in instances if one.declaration.source == source]


def _rows(arch: str) -> Iterator[Sequence[Instance]]:
    is_full = arch in FULL_ARCHS
    yield [
        instance
        for dtype in ("bfloat16", "float16")
        for size, one_plus in (_NORM_SIZES if is_full else _NORM_SIZES[2:4])
        for instance in norm.instances(dtype, size, one_plus=one_plus)
    ]
    # A vocabulary of a model, and a tiny one's.
    for vocab_size in (128_256, 256) if is_full else (128_256,):
        yield sampling.instances(sampling.threads_of_row(vocab_size))
    yield list(gather.instances().values())
