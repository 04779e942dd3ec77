"""A row of logits block by block, for njit code. A last block that is not whole is padded."""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.logit_kernels import BLOCK, block_maximum, block_weights

LOG2_E = 1.4426950408889634


@njit(nogil=True)
def new_last_block(row):
    """f32[BLOCK]: what is left over after the whole blocks, then -inf."""
    last = np.full(BLOCK, -np.inf, np.float32)
    rest = row[row.shape[0] // BLOCK * BLOCK :]
    for i in range(rest.shape[0]):  # Numba takes 2 s to compile the assignment of a slice
        last[i] = rest[i]
    return last


@njit(nogil=True)
def _address(row, block, last_block):
    if BLOCK * (block + 1) <= row.shape[0]:
        return row.ctypes.data + 4 * BLOCK * block
    return last_block.ctypes.data


@njit(nogil=True)
def scan_maxima(maxima, row, last_block):
    """maxima[block] = the largest logit of each block; the largest of all. NaN is left out."""
    most = np.float32(-np.inf)
    for block in range(maxima.shape[0]):
        maxima[block] = block_maximum(_address(row, block, last_block))
        most = max(most, maxima[block])
    return most


@njit(nogil=True)
def weigh_block(weights, row, block, last_block, most, scale):
    """weights f32[BLOCK] = 2 ** ((logits - most) * scale); their sum."""
    address = _address(row, block, last_block)
    return block_weights(weights.ctypes.data, address, most, scale)


@njit(nogil=True)
def first_index_of(value, row, maxima):
    """The lowest index of a value that is the largest of its block."""
    for block in range(maxima.shape[0]):
        if maxima[block] == value:
            part = row[BLOCK * block : BLOCK * (block + 1)]
            for i in range(part.shape[0]):
                if part[i] == value:
                    return BLOCK * block + i
    return -1


@njit(nogil=True)
def kth_largest(maxima, k):
    """At least k logits are as large as this; -inf if there are fewer blocks than k.

    Hoare's quickselect (CACM 4, 1961, algorithm 65). No value is NaN. `np.partition` does the same,
    and takes Numba 3 s to compile.
    """
    if k > maxima.shape[0]:
        return np.float32(-np.inf)
    values = maxima.copy()
    low, high, wanted = 0, values.shape[0] - 1, k - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    return values[wanted]
