"""Philox4x32-10, the counter-based generator of Salmon et al. (SC'11), for njit code.

A draw is a function of key and counter alone: no state, so that a request's randomness does not
depend on what ran beside it or before a preemption.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)


@njit(nogil=True)
def philox4x32(key, c0, c1, c2, c3):
    """Four 32-bit random words, each in a uint64, from a 64-bit key and a 128-bit counter."""
    k0 = key & _MASK
    k1 = key >> _BITS
    for _ in range(10):
        product0 = _M0 * c0
        product1 = _M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> _BITS) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> _BITS) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@njit(nogil=True)
def uniform(key, position, sample_index):
    """A float64 in [0, 1) with 53 random bits, for one position of one sample."""
    zero = np.uint64(0)
    high, low, _, _ = philox4x32(key, np.uint64(position), np.uint64(sample_index), zero, zero)
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return np.float64(bits) * 2.0**-53
