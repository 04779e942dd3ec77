"""From logits to tokens: edits, temperature, min-p, top-k, top-p, the draw, log-probabilities.

Nothing is sorted. Weights w = exp((logit - max) / temperature) are positive floats, whose bits
order as they do, so the k-th largest weight and the weight at which the mass reaches top_p are
found by a radix descent over histograms of the bits. Tokens that tie with the last one kept are
kept too; so the kept set does not depend on an order of sorting.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.floats import exp
from rawpaged.cpu.philox import uniform

_ZERO = np.float32(0.0)
_LOWEST = np.float32(-87.0)
_RADIX_BITS = 11
_BUCKETS = 1 << _RADIX_BITS
_SHIFTS = (21, 10, 0)  # bits [21, 32), [10, 21), [0, 10); the sign is always 0


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


@njit(nogil=True)
def _argmax(row):
    """Lowest index of the largest value; -1 when nothing is above -inf (NaN or all forbidden)."""
    best = -1
    most = np.float32(-np.inf)
    for i in range(row.shape[0]):
        if row[i] > most:
            most = row[i]
            best = i
    return best


@njit(nogil=True)
def _threshold(weights, least, amount, by_mass):
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
def _kept_mass(weights, least):
    mass = 0.0
    bits = weights.view(np.uint32)
    for i in range(weights.shape[0]):
        if bits[i] >= least:
            mass += np.float64(weights[i])
    return mass


@njit(nogil=True)
def _draw(weights, least, mass, u):
    """The token at which the running sum of kept weights, by id, first exceeds u * mass."""
    target = u * mass
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


@kernel
def sample_rows(
    out, logits, temperature, top_k, top_p, min_p, seeds, positions, sample_indices, start, stop
):
    """One token id for each row in [start, stop), -1 where no logit is above -inf."""
    size = logits.shape[1]
    weights = np.empty(size, np.float32)
    for r in range(start, stop):
        best = _argmax(logits[r])
        out[r] = best
        if temperature[r] == _ZERO or best < 0:
            continue
        most = logits[r, best]
        for i in range(size):
            scaled = (logits[r, i] - most) / temperature[r]
            weights[i] = exp(scaled) if scaled >= _LOWEST else _ZERO
        # min_p is a share of the largest weight, which is 1; weight 0 is never drawn.
        least = max(np.float32(min_p[r]).view(np.uint32), np.uint32(1))
        if 0 < top_k[r] < size:
            least = _threshold(weights, least, np.float64(top_k[r]), False)
        if top_p[r] < np.float32(1.0):
            mass = _kept_mass(weights, least)
            least = _threshold(weights, least, np.float64(top_p[r]) * mass, True)
        mass = _kept_mass(weights, least)
        out[r] = _draw(weights, least, mass, uniform(seeds[r], positions[r], sample_indices[r]))


@kernel
def logprob_rows(
    chosen, ranks, top_ids, top_logprobs, logits, token_ids, start, stop
):
    """Log-probabilities of token_ids and of the likeliest tokens, for rows in [start, stop)."""
    k = top_ids.shape[1]
    for r in range(start, stop):
        row = logits[r]
        most = row[max(_argmax(row), 0)]
        total = 0.0
        rank = 1
        held = 0
        target = row[token_ids[r]]
        for i in range(row.shape[0]):
            shifted = row[i] - most
            if shifted >= _LOWEST:
                total += np.float64(exp(shifted))
            if row[i] > target:
                rank += 1
            if held < k or (k > 0 and row[i] > top_logprobs[r, k - 1]):
                place = min(held, k - 1)
                while place > 0 and row[i] > top_logprobs[r, place - 1]:
                    top_logprobs[r, place] = top_logprobs[r, place - 1]
                    top_ids[r, place] = top_ids[r, place - 1]
                    place -= 1
                top_logprobs[r, place] = row[i]
                top_ids[r, place] = i
                held = min(held + 1, k)
        log_total = np.log(total)
        chosen[r] = np.float32(np.float64(target - most) - log_total)
        ranks[r] = rank
        for j in range(k):
            top_logprobs[r, j] = np.float32(np.float64(top_logprobs[r, j] - most) - log_total)
