"""One partition of keys of one task: scores, exponentials and weighted values, for njit code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rawpaged.cpu.attention_kernels import (
    MOST_ROWS,
    STRIP,
    copy_lower_halves,
    make_score_kernel,
    make_value_kernel,
)
from rawpaged.cpu.compiling import set_variant
from rawpaged.cpu.products import Arithmetic, x_bytes_of_step
from rawpaged.cpu.softmax_kernel import SOFTMAX_ROWS, hide_scores, make_softmax_kernel
from rawpaged.cpu.vector_ir import LANES

_ZERO = np.float32(0.0)


def make_partition(arithmetic: Arithmetic) -> Any:
    """njit code for one partition of one task."""
    run_scores = make_score_kernel(arithmetic)
    run_softmax = make_softmax_kernel(bfloat16=arithmetic == "bfloat16_dot")
    add_values = _make_values(arithmetic)
    bytes_of_step = x_bytes_of_step(arithmetic)

    def attend(
        values, states, queries, scores, weights, bounds, groups, ahead, layout, end, odd_line
    ):
        """values = weighted values of the partition's first `end` keys, states = (maximum, sum).

        A row sees the keys [bounds[row, 0], bounds[row, 1]) of the partition; if that is none, its
        sum is 0. groups[0] are the addresses of the groups of keys, groups[1] those of
        values, `ahead` those of what to prefetch. layout: bytes of a line of keys, and of a line to
        prefetch; values to prefetch are smaller by 2 ** layout[2]. scores and weights are room
        for MOST_ROWS rows, which stays in the first-level cache.
        """
        rows = values.shape[0]
        count = (end + LANES - 1) // LANES
        num_tiles = (rows + MOST_ROWS - 1) // MOST_ROWS
        for tile in range(num_tiles):
            low = rows * tile // num_tiles
            high = rows * (tile + 1) // num_tiles
            run_scores(
                high - low,
                queries.ctypes.data + low * queries.strides[0],
                queries.strides[0],
                groups.ctypes.data,
                ahead.ctypes.data,
                count,
                queries.shape[1] * queries.itemsize // bytes_of_step,
                layout[0],
                layout[1],
                scores.ctypes.data,
                scores.strides[0],
            )
            for row in range(low, high):
                first, last = bounds[row, 0], bounds[row, 1]
                if first > 0 or last < LANES * count:
                    place = scores.ctypes.data + (row - low) * scores.strides[0]
                    hide_scores(place, first, last, count)
            for row in range(low, high, SOFTMAX_ROWS):
                run_softmax(
                    min(SOFTMAX_ROWS, high - row),
                    weights.ctypes.data + (row - low) * weights.strides[0],
                    weights.strides[0],
                    scores.ctypes.data + (row - low) * scores.strides[0],
                    scores.strides[0],
                    count,
                    states.ctypes.data + row * states.strides[0],
                    states.strides[0],
                )
            add_values(
                values[low:high], weights, groups[1], ahead[1], layout[2], end, odd_line
            )

    return njit(nogil=True)(set_variant(attend, arithmetic))


def _make_values(arithmetic: Arithmetic) -> Any:
    """njit code for the weighted values of a partition."""
    run_strip = make_value_kernel(arithmetic, STRIP)
    run_vector = make_value_kernel(arithmetic, 1)
    in_word = 1 if arithmetic == "float32" else 2
    bytes_of_step = x_bytes_of_step(arithmetic)

    def add_lines(values, weights, weights_stride, groups, ahead, ahead_shift, count, steps):
        """Add `steps` lines of each of `count` groups; all but values are addresses."""
        rows, width = values.shape
        column = 0
        while column < width:
            target = values.ctypes.data + 4 * column
            place = 4 * column
            if column + LANES * STRIP <= width:
                column += LANES * STRIP
                run_strip(
                    rows, weights, weights_stride, groups, ahead, ahead_shift, count, steps,
                    4 * width, place, target, values.strides[0],
                )  # fmt: skip
            else:
                column += LANES
                run_vector(
                    rows, weights, weights_stride, groups, ahead, ahead_shift, count, steps,
                    4 * width, place, target, values.strides[0],
                )  # fmt: skip

    add_lines = njit(nogil=True)(set_variant(add_lines, arithmetic))

    def add_values(values, weights, groups, ahead, ahead_shift, end, odd_line):
        """values = weights * the first `end` keys' values; no others are read.

        Whole groups, then the whole lines of the last, then half a line by way of odd_line
        i64[1 + width / 2].
        """
        values[:] = _ZERO
        whole, rest = end // LANES, end % LANES
        source = weights.ctypes.data
        for part in range(3):
            first, count, steps = whole, 1, rest // in_word
            listed = groups.ctypes.data + 8 * whole
            if part == 0:
                first, count, steps = 0, whole, LANES // in_word
                listed = groups.ctypes.data
            elif part == 2:
                steps = rest % in_word
                if steps != 0:
                    line = odd_line.ctypes.data + 8
                    place = rest // in_word * 4 * values.shape[1]
                    copy_lower_halves(line, groups[whole] + place, values.shape[1] // LANES)
                    odd_line[0] = line
                    listed = odd_line.ctypes.data
                source += rest // in_word * bytes_of_step
            if count * steps != 0:
                add_lines(
                    values,
                    source + LANES * weights.itemsize * first,
                    weights.strides[0],
                    listed,
                    ahead.ctypes.data + 8 * first,
                    ahead_shift,
                    count,
                    steps,
                )

    return njit(nogil=True)(set_variant(add_values, arithmetic))
