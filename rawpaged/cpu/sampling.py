"""From logits to tokens: edits, temperature, min-p, top-k, top-p, the draw.

Nothing is sorted (`thresholds.py`). Weights are w = exp((logit - max) / temperature). One pass over
the logits finds the largest of every block of BLOCK; with those most blocks need no second look.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.logit_blocks import (
    LOG2_E,
    first_index_of,
    kth_largest,
    new_last_block,
    scan_maxima,
    weigh_block,
)
from rawpaged.cpu.logit_kernels import BLOCK
from rawpaged.cpu.philox import uniform
from rawpaged.cpu.thresholds import kept_mass, threshold

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_NOTHING = np.float32(-np.inf)
_MOST_SCALE = float(np.finfo(np.float32).max)
_TOP_P_POWERS = (np.float32(8.0), np.float32(14.0), np.float32(np.inf))
"""Powers of two below the largest weight within which the tokens of top_p are looked for."""


@kernel
def edit_logits_entries(
    logits, rows, token_ids, bias, seen, counts, repetition, frequency, presence, start, stop
):
    """Apply entries [start, stop) of rawpaged.backend.LogitEdits in place."""
    for i in range(start, stop):
        row = rows[i]
        logit = logits[row, token_ids[i]] + bias[i]
        if seen[i]:
            penalty = repetition[row]
            logit = logit / penalty if logit > _ZERO else logit * penalty
        logit -= frequency[row] * np.float32(counts[i])
        if counts[i] > 0:
            logit -= presence[row]
        logits[row, token_ids[i]] = logit


@kernel
def sample_rows(
    out, logits, temperature, top_k, top_p, min_p, seeds, positions, sample_indices, start, stop
):
    """One token id for each row in [start, stop), -1 where no logit is above -inf."""
    size = logits.shape[1]
    num_blocks = (size + BLOCK - 1) // BLOCK
    maxima = np.empty(num_blocks, np.float32)
    weights = np.empty(BLOCK, np.float32)
    kept_ids = np.empty(size, np.int32)
    kept_weights = np.empty(size, np.float32)
    for r in range(start, stop):
        row = logits[r]
        last_block = new_last_block(row)
        most = scan_maxima(maxima, row, last_block)
        if not most > _NOTHING:
            out[r] = -1
            continue
        if temperature[r] == _ZERO:
            out[r] = first_index_of(most, row, maxima)
            continue
        # Were it infinite, the largest logit's 0 times it would be no number.
        scale = np.float32(min(LOG2_E / temperature[r], _MOST_SCALE))
        u = uniform(seeds[r], positions[r], sample_indices[r])
        k = top_k[r] if top_k[r] < size else 0
        if k <= 0 and top_p[r] >= _ONE and min_p[r] <= _ZERO:
            out[r] = _draw_from_all(row, last_block, maxima, most, scale, u, weights)
            continue
        count, least = _keep(
            row, last_block, maxima, most, scale, k, top_p[r], min_p[r], weights, kept_ids,
            kept_weights,
        )
        drawn = _draw(kept_weights[:count], least, u)
        out[r] = kept_ids[drawn] if drawn >= 0 else -1


@njit(nogil=True)
def _keep(row, last_block, maxima, most, scale, k, top_p, min_p, weights, kept_ids, kept_weights):
    """Fill kept_ids and kept_weights with tokens, by id, among which are those that may be drawn.

    Returns how many there are, and the bits of the least weight that may be drawn.
    """
    # min_p is a share of the largest weight, which is 1; weight 0 is never drawn.
    least = max(np.float32(min_p).view(np.uint32), np.uint32(1))
    lowest = kth_largest(maxima, k) if k > 0 else _NOTHING
    only_top_p = k <= 0 and min_p <= _ZERO
    total = 0.0
    if only_top_p:
        for block in range(maxima.shape[0]):
            total += np.float64(weigh_block(weights, row, block, last_block, most, scale))
    count = 0
    for powers in _TOP_P_POWERS:
        if only_top_p:
            lowest = np.float32(most - powers / scale)
        count = _collect(
            row, last_block, maxima, most, scale, lowest, least, weights, kept_ids, kept_weights
        )
        if not only_top_p or kept_mass(kept_weights[:count], least) >= top_p * total:
            break
    found = kept_weights[:count]
    if k > 0:
        least = threshold(found, least, np.float64(k), False)
    if top_p < _ONE:
        mass = total if only_top_p else kept_mass(found, least)
        least = threshold(found, least, np.float64(top_p) * mass, True)
    return count, least


@njit(nogil=True)
def _collect(
    row, last_block, maxima, most, scale, lowest, least, weights, kept_ids, kept_weights
):
    """Tokens with logits from `lowest` and weights from `least` on, in the order of their ids."""
    count = 0
    for block in range(maxima.shape[0]):
        if maxima[block] >= lowest:
            weigh_block(weights, row, block, last_block, most, scale)
            bits = weights.view(np.uint32)
            logits = row[BLOCK * block : BLOCK * (block + 1)]
            for i in range(logits.shape[0]):
                kept_ids[count] = BLOCK * block + i
                kept_weights[count] = weights[i]
                if bits[i] >= least and logits[i] >= lowest:
                    count += 1
    return count


@njit(nogil=True)
def _draw(weights, least, u):
    """Index at which the running sum of weights from `least` on exceeds u times their sum; -1."""
    target = u * kept_mass(weights, least)
    total = 0.0
    last = -1
    bits = weights.view(np.uint32)
    for i in range(weights.shape[0]):
        if bits[i] >= least:
            total += np.float64(weights[i])
            last = i
            if total > target:
                return i
    return last


@njit(nogil=True)
def _draw_from_all(row, last_block, maxima, most, scale, u, weights):
    """The token at which the running sum of weights, by id, exceeds u times their sum; -1."""
    num_blocks = maxima.shape[0]
    sums = np.empty(num_blocks, np.float64)
    for block in range(num_blocks):
        sums[block] = weigh_block(weights, row, block, last_block, most, scale)
    target = u * sums.sum()
    total = 0.0
    for block in range(num_blocks):
        if total + sums[block] > target:
            weigh_block(weights, row, block, last_block, most, scale)
            last = -1
            for i in range(BLOCK):
                if weights[i] > _ZERO:
                    total += np.float64(weights[i])
                    last = BLOCK * block + i
                    if total > target:
                        break
            # Where rounding kept the running sum of the last one below target.
            return last
        total += sums[block]
    # The same for the sum of all: the largest weight then, if there is any.
    return first_index_of(most, row, maxima) if total > 0.0 else -1
