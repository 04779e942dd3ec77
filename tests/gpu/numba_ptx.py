"""Compiles every Numba kernel to PTX without a GPU, and says as JSON what came out.

    NUMBA_ENABLE_CUDASIM=0 python -m tests.gpu.numba_ptx 8.0 9.0

Run as a process of its own, for Numba's simulator has no compiler.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numba.cuda.dispatcher
from numba import types

from rawpaged.gpu import numba_kernels

_ELEMENTS = {"bfloat16": types.uint16, "float16": types.float16}


def rows(dtype: Any, ndim: int) -> Any:
    """A contiguous array."""
    return types.Array(dtype, ndim, "C")


def views(dtype: Any, ndim: int) -> Any:
    """An array of any strides."""
    return types.Array(dtype, ndim, "A")


def kernels() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Every kernel with the types it is launched with; made anew for each architecture."""
    f32, i32, i64, u64 = types.float32, types.int32, types.int64, types.uint64
    angles = (rows(i32, 1), rows(f32, 2))
    for dtype, element in _ELEMENTS.items():
        heads, slots, scales = views(element, 3), rows(i64, 1), (rows(f32, 1),) * 2
        yield numba_kernels.make_embed(dtype), (rows(f32, 2), rows(i32, 1), rows(element, 2))
        yield numba_kernels.make_silu_and_mul(dtype), (rows(element, 2), rows(element, 2))
        bytes_of = {"fp8_e4m3": types.uint8, "int8": types.int8}
        for cache_dtype, of_cache in {dtype: element, **bytes_of}.items():
            pools = (rows(of_cache, 4),) * 2
            store = numba_kernels.make_rope_store(dtype, cache_dtype)
            yield store, (heads, heads, heads, *angles, *pools, slots, *scales)
    entries = (rows(i32, 1), rows(i32, 1), rows(f32, 1), rows(types.boolean, 1), rows(i32, 1))
    edit = numba_kernels.make_edit_logits()
    yield edit, (rows(f32, 2), *entries, rows(f32, 1), rows(f32, 1), rows(f32, 1))
    yield numba_kernels.make_mask_logits(), (rows(f32, 2), rows(i32, 2), rows(i32, 1))
    yield numba_kernels.make_take_token_ids(), (rows(i32, 1), rows(i32, 1))
    yield numba_kernels.make_copy_blocks(), (rows(u64, 2), rows(u64, 2), rows(i64, 2))


def compile_to_ptx(kernel: Callable[..., None], signature: Any, cc: tuple[int, int]) -> str:
    """PTX of a kernel, whose device functions Numba would compile for the GPU that is here."""
    cuda: Any = numba.cuda
    cuda.dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    ptx, _ = cuda.compile(kernel, signature, cc=cc, device=False, abi="numba", output="ptx")
    return str(ptx)


def facts(kernel: Callable[..., None], ptx: str) -> dict[str, Any]:
    return {
        "kernel": kernel.__name__,
        "target": re.findall(r"^\.target (\w+)", ptx, re.MULTILINE),
        "entries": re.findall(r"\.entry (\w+)", ptx),
        "local_memory": ".local" in ptx,
        "double": bool(re.search(r"\.f64\b", ptx)),
        "calls": bool(re.search(r"^\s*call", ptx, re.MULTILINE)),
    }


def main() -> None:
    found = []
    for text in sys.argv[1:]:
        major, minor = text.split(".")
        for kernel, signature in kernels():
            ptx = compile_to_ptx(kernel, signature, (int(major), int(minor)))
            found.append(facts(kernel, ptx))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
