"""Log-probabilities of given tokens and of the likeliest."""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.logit_blocks import LOG2_E, kth_largest, new_last_block, scan_maxima, weigh_block
from rawpaged.cpu.logit_kernels import BLOCK


@kernel
def logprob_rows(chosen, ranks, top_ids, top_logprobs, logits, token_ids, start, stop):
    """Log-probabilities of token_ids and of the likeliest tokens, for rows in [start, stop)."""
    size = logits.shape[1]
    k = top_ids.shape[1]
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    weights = np.empty(BLOCK, np.float32)
    for r in range(start, stop):
        row = logits[r]
        last_block = new_last_block(row)
        most = scan_maxima(maxima, row, last_block)
        if not most > np.float32(-np.inf):
            most = row[0]
        total = 0.0
        for block in range(maxima.shape[0]):
            scale = np.float32(LOG2_E)
            total += np.float64(weigh_block(weights, row, block, last_block, most, scale))
        log_total = np.log(total)
        target = row[token_ids[r]]
        chosen[r] = np.float32(np.float64(target - most) - log_total)
        ranks[r] = 1 + _count_above(row, target)
        if k > 0:
            _find_top(top_ids[r], top_logprobs[r], row, maxima)
            for j in range(k):
                top_logprobs[r, j] = np.float32(np.float64(top_logprobs[r, j] - most) - log_total)


@njit(nogil=True)
def _count_above(row, target):
    count = np.int32(0)
    for i in range(row.shape[0]):
        count += np.int32(row[i] > target)
    return count


@njit(nogil=True)
def _find_top(ids, logits, row, maxima):
    """The likeliest tokens and their logits, the lowest ids first among equals."""
    k = ids.shape[0]
    lowest = kth_largest(maxima, k)
    held = 0
    for block in range(maxima.shape[0]):
        if maxima[block] < lowest or (held == k and maxima[block] <= logits[k - 1]):
            continue
        part = row[BLOCK * block : BLOCK * (block + 1)]
        for i in range(part.shape[0]):
            if held < k or part[i] > logits[k - 1]:
                place = min(held, k - 1)
                while place > 0 and part[i] > logits[place - 1]:
                    logits[place] = logits[place - 1]
                    ids[place] = ids[place - 1]
                    place -= 1
                logits[place] = part[i]
                ids[place] = BLOCK * block + i
                held = min(held + 1, k)
