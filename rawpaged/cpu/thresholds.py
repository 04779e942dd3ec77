"""Thresholds on weights by their bits: top-k and top-p without sorting, for njit code.

Weights are positive floats, whose bits order as they do, so the k-th largest weight and the weight
at which the mass reaches top_p are found by a radix descent over histograms of the bits. Tokens
that tie with the last one kept are kept too, so that no order of sorting decides who is kept.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_RADIX_BITS = 11
_BUCKETS = 1 << _RADIX_BITS
_SHIFTS = (21, 10, 0)  # bits [21, 32), [10, 21), [0, 10); the sign is always 0


@njit(nogil=True)
def threshold(weights, least, amount, by_mass):
    """The smallest weight kept, as bits, among weights whose bits are >= least.

    Kept are the largest weights until their number (or, `by_mass`, their sum) reaches amount.
    """
    histogram = np.zeros(_BUCKETS, np.float64)
    all_bits = weights.view(np.uint32)
    prefix = np.uint32(0)
    above = 0.0
    for level in range(3):
        shift = np.uint32(_SHIFTS[level])
        histogram[:] = 0.0
        mask = np.uint32(_BUCKETS - 1 if level < 2 else (1 << 10) - 1)
        for i in range(weights.shape[0]):
            bits = all_bits[i]
            same = level == 0 or (
                (bits >> np.uint32(_SHIFTS[level - 1])) == (prefix >> np.uint32(_SHIFTS[level - 1]))
            )
            if bits >= least and same:
                histogram[(bits >> shift) & mask] += np.float64(weights[i]) if by_mass else 1.0
        bucket = np.int64(mask)
        lowest = -1
        while bucket >= 0:
            if histogram[bucket] > 0.0:
                lowest = bucket
                if above + histogram[bucket] >= amount:
                    break
                above += histogram[bucket]
            bucket -= 1
        if bucket < 0:
            # Rounding left the total a hair below amount: descend into the lowest bucket.
            if lowest < 0:
                return least
            above -= histogram[lowest]
            bucket = lowest
        prefix |= np.uint32(bucket) << shift
    return prefix


@njit(nogil=True)
def kept_mass(weights, least):
    mass = 0.0
    bits = weights.view(np.uint32)
    for i in range(weights.shape[0]):
        if bits[i] >= least:
            mass += np.float64(weights[i])
    return mass
