"""Kernels in Numba-CUDA: what needs no warp primitives and no tensor cores.

Each function here makes the Python function of one kernel, named as profilers shall show it;
`gpu/numba_launch.py` compiles and launches it. Loops step by the launch's size, so that any grid
and block give the same result. Rows go over blockIdx.x, the elements of one over the rest.

T is bfloat16 or float16. Numba has no bfloat16 that its simulator knows too, so such arrays come
as uint16 and are converted by shifts. Arithmetic is float32, rounded to nearest even when stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba.cuda
import numpy as np

from rawpaged.gpu.kv_elements import make_element

cuda: Any = numba.cuda

LABELS = {"bfloat16": "bf16", "float16": "f16"}
"""Names of T in kernels' names."""
CACHE_LABELS = {"fp8_e4m3": "fp8", "int8": "int8"}
"""Names of caches of bytes there."""

_ONE = np.float32(1.0)
_MOST = np.float32(80.0)
_ZERO = np.float32(0.0)
_NEGATIVE_INFINITY = np.float32(-np.inf)


def conversions(dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Device functions: float32 of a stored element, and the element that stores a float32."""

    @cuda.jit(device=True)
    def load_bfloat16(bits):
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)

    @cuda.jit(device=True)
    def store_bfloat16(x):
        bits = np.float32(x).view(np.uint32)
        if x != x:
            return np.uint16(0x7FC0)
        round_up = np.uint32(np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return np.uint16(np.uint32(bits + round_up) >> np.uint32(16))

    @cuda.jit(device=True)
    def load_float16(x):
        return np.float32(x)

    @cuda.jit(device=True)
    def store_float16(x):
        return np.float16(x)

    if dtype == "bfloat16":
        return load_bfloat16, store_bfloat16
    return load_float16, store_float16


def make_embed(dtype: str) -> Callable[..., None]:
    """out[t] f32 = table[token_ids[t]], of which the first columns are taken."""
    load, _ = conversions(dtype)

    def embed(out, token_ids, table):
        first = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        step = cuda.gridDim.y * cuda.blockDim.x
        for t in range(cuda.blockIdx.x, out.shape[0], cuda.gridDim.x):
            row = table[token_ids[t]]
            for i in range(first, out.shape[1], step):
                out[t, i] = load(row[i])

    return _named(embed, f"embed_{LABELS[dtype]}")


def make_silu_and_mul(dtype: str) -> Callable[..., None]:
    """out[t] = gate / (1 + exp(-gate)) * up, with gate_up[t] = [gate | up]."""
    load, store = conversions(dtype)

    def silu_and_mul(out, gate_up):
        first = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        step = cuda.gridDim.y * cuda.blockDim.x
        size = out.shape[1]
        for t in range(cuda.blockIdx.x, out.shape[0], cuda.gridDim.x):
            for i in range(first, size, step):
                gate = load(gate_up[t, i])
                up = load(gate_up[t, size + i])
                # As on the CPU: exp stays finite, and a share below 2e-35 is as good as none.
                share = _ONE + np.float32(math.exp(min(-gate, _MOST)))
                out[t, i] = store(gate / share * up)

    return _named(silu_and_mul, f"silu_and_mul_{LABELS[dtype]}")


def make_rope_store(dtype: str, cache_dtype: str) -> Callable[..., None]:
    """Rotate q in place, and write rotated k and v to their slots; threadIdx.y goes over heads.

    In the half-split order. Numbers are rounded once, from float32 to the cache's type, whose
    scales are read for caches of bytes only.
    """
    load, store = conversions(dtype)
    element = make_element(store, cache_dtype)
    is_scaled = cache_dtype != dtype

    def rope_store(
        q, k, v, positions, cos_sin, cache_keys, cache_values, slots, key_scale, value_scale
    ):
        half = q.shape[2] // 2
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        block_size = cache_keys.shape[2]
        first_head = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
        for t in range(cuda.blockIdx.x, q.shape[0], cuda.gridDim.x):
            angles = cos_sin[positions[t]]
            slot = slots[t]
            block, offset = slot // block_size, slot % block_size
            for h in range(
                first_head, num_heads + num_kv_heads, cuda.gridDim.y * cuda.blockDim.y
            ):
                kv_head = h - num_heads
                source = q[t, h] if kv_head < 0 else k[t, kv_head]
                of_key = key_scale[kv_head] if is_scaled and kv_head >= 0 else _ONE
                of_value = value_scale[kv_head] if is_scaled and kv_head >= 0 else _ONE
                for i in range(cuda.threadIdx.x, half, cuda.blockDim.x):
                    low, high = load(source[i]), load(source[half + i])
                    cosine, sine = angles[i], angles[half + i]
                    first = low * cosine - high * sine
                    second = high * cosine + low * sine
                    if kv_head < 0:
                        q[t, h, i] = store(first)
                        q[t, h, half + i] = store(second)
                    elif slot >= 0:
                        value, other = v[t, kv_head, i], v[t, kv_head, half + i]
                        keys = cache_keys[block, kv_head, offset]
                        values = cache_values[block, kv_head, offset]
                        keys[i] = element(first, of_key)
                        keys[half + i] = element(second, of_key)
                        values[i] = element(load(value), of_value)
                        values[half + i] = element(load(other), of_value)

    suffix = "" if cache_dtype == dtype else f"_{CACHE_LABELS[cache_dtype]}"
    return _named(rope_store, f"rope_store_{LABELS[dtype]}{suffix}")


def make_edit_logits() -> Callable[..., None]:
    """Apply rawpaged.backend.LogitEdits in place, an entry a thread."""

    def edit_logits(
        logits, rows, token_ids, bias, seen, counts, repetition, frequency, presence
    ):
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for entry in range(first, rows.shape[0], cuda.gridDim.x * cuda.blockDim.x):
            row, token = rows[entry], token_ids[entry]
            logit = logits[row, token] + bias[entry]
            if seen[entry]:
                penalty = repetition[row]
                logit = logit / penalty if logit > _ZERO else logit * penalty
            logit -= frequency[row] * np.float32(counts[entry])
            if counts[entry] > 0:
                logit -= presence[row]
            logits[row, token] = logit

    return _named(edit_logits, "edit_logits")


def make_mask_logits() -> Callable[..., None]:
    """logits[rows[j], i] = -inf where bit i % 32 of masks[j, i // 32] is 0."""

    def mask_logits(logits, masks, rows):
        first = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        step = cuda.gridDim.y * cuda.blockDim.x
        for j in range(cuda.blockIdx.x, rows.shape[0], cuda.gridDim.x):
            for i in range(first, logits.shape[1], step):
                if (masks[j, i >> 5] >> (i & 31)) & 1 == 0:
                    logits[rows[j], i] = _NEGATIVE_INFINITY

    return _named(mask_logits, "mask_logits")


def make_take_token_ids() -> Callable[..., None]:
    """token_ids[t] = drawn[-1 - token_ids[t]] where token_ids[t] is negative; at least 0."""

    def take_token_ids(token_ids, drawn):
        first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        for t in range(first, token_ids.shape[0], cuda.gridDim.x * cuda.blockDim.x):
            row = -1 - token_ids[t]
            if row >= 0:
                token_ids[t] = max(drawn[row], 0)

    return _named(take_token_ids, "take_token_ids")


def make_copy_blocks() -> Callable[..., None]:
    """target[pairs[j, 1]] = source[pairs[j, 0]], in words of 8 bytes."""

    def copy_blocks(target, source, pairs):
        first = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        step = cuda.gridDim.y * cuda.blockDim.x
        for j in range(cuda.blockIdx.x, pairs.shape[0], cuda.gridDim.x):
            for i in range(first, source.shape[1], step):
                target[pairs[j, 1], i] = source[pairs[j, 0], i]

    return _named(copy_blocks, "copy_blocks")


def _named(kernel: Callable[..., None], name: str) -> Callable[..., None]:
    """Numba names machine code after the function."""
    kernel.__name__ = kernel.__qualname__ = name
    return kernel
