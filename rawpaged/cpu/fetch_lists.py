"""What a step's products fetch beside their weights, listed for njit code (`kv_ahead.py`)."""

from __future__ import annotations

import numpy as np
from numba import njit

from rawpaged.cpu.attention_work import (
    FIRST,
    FIRST_PARTITION,
    HEAD,
    LAST,
    LAST_PARTITION,
    PARTITION,
    REQUEST,
)
from rawpaged.cpu.compiling import kernel
from rawpaged.cpu.vector_ir import FETCHED_BYTES

KEYS, VALUES, KEY_BYTES, VALUE_BYTES, BEGIN, END = range(6)
"""Of a share: addresses of a layer's pools, bytes of a block in each, and which part of every
section of the list it is, in units of 1 / WHOLE."""
SHARE_WORDS = 6
WHOLE = 1 << 16

SECTIONS = 8
"""Of the list. Items in the n-th eighth of a product fetch of the n-th section, so that it is the
thread whose region this is, in the product as in attention."""


@kernel
def list_blocks(
    blocks,  # i32[1 + capacity]
    tasks,  # i32[capacity, TASK_FIELDS]
    num_tasks,  # i64[1]
    block_tables,
    seq_lens,
    block_size,
    most,
    start,
    stop,
):
    """blocks = a number, at most `most`, then so many blocks: single queries', in tasks' order."""
    place = 0
    for task in tasks[: num_tasks[0]]:
        if task[HEAD] != 0 or task[LAST] - task[FIRST] != 1:
            continue
        request = task[REQUEST]
        end = min(task[LAST_PARTITION] * PARTITION, seq_lens[request])
        for index in range(
            task[FIRST_PARTITION] * PARTITION // block_size, (end + block_size - 1) // block_size
        ):
            if place < most:
                blocks[1 + place] = block_tables[request, index]
                place += 1
    blocks[0] = place


@njit(nogil=True)
def list_pieces(listed, blocks, share, item, num_items):
    """listed i64[room] = addresses of what item number `item` of a product fetches; how many.

    Items share the product's part of their section, in pieces of FETCHED_BYTES. What there is no
    room for is left out.
    """
    if blocks[0] == 0 or share[END] == 0:
        return 0
    key_pieces = _pieces(share[KEY_BYTES])
    pieces = key_pieces + _pieces(share[VALUE_BYTES])
    total = blocks[0] * pieces
    section = item * SECTIONS // num_items
    start = total * section // SECTIONS
    size = total * (section + 1) // SECTIONS - start
    begin = start + size * share[BEGIN] // WHOLE
    size = start + size * share[END] // WHOLE - begin
    first_item = (section * num_items + SECTIONS - 1) // SECTIONS
    own_items = ((section + 1) * num_items + SECTIONS - 1) // SECTIONS - first_item
    first = begin + size * (item - first_item) // own_items
    last = begin + size * (item - first_item + 1) // own_items
    last = min(last, first + listed.shape[0])
    index = first // pieces
    piece = first % pieces
    for place in range(last - first):
        block = np.int64(blocks[1 + index])
        if piece < key_pieces:
            address = share[KEYS] + block * share[KEY_BYTES] + piece * FETCHED_BYTES
        else:
            offset = (piece - key_pieces) * FETCHED_BYTES
            address = share[VALUES] + block * share[VALUE_BYTES] + offset
        listed[place] = address
        piece += 1
        if piece == pieces:
            piece = 0
            index += 1
    return last - first


@njit(nogil=True)
def _pieces(num_bytes):
    return (num_bytes + FETCHED_BYTES - 1) // FETCHED_BYTES
