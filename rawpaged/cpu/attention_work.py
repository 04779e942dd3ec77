"""Cuts the attention of a step into tasks that threads take as they come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rawpaged.backend import BatchMeta

TILE_ROWS = 32
"""Query rows of a task at most, unless one token has more query heads in a group."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Tasks of one step, the costliest first, so that the last to be taken are short."""

    tasks: npt.NDArray[np.int32]  # i32[num_tasks, 4]: request, kv head, first and last + 1 row
    max_seq_len: int


def split_work(meta: BatchMeta, num_heads: int, num_kv_heads: int) -> AttentionWork:
    """Each request's queries in tiles, once a KV head."""
    tile = max(1, TILE_ROWS // (num_heads // num_kv_heads))
    begins, ends = meta.query_start_loc[:-1], meta.query_start_loc[1:]
    num_tiles = -(-(ends - begins) // tile)
    requests = np.repeat(np.arange(len(begins), dtype=np.int32), num_tiles)
    tile_in_request = np.arange(len(requests)) - (np.cumsum(num_tiles) - num_tiles)[requests]
    first = begins[requests] + tile * tile_in_request
    last = np.minimum(first + tile, ends[requests])
    keys = meta.seq_lens[requests] - (ends[requests] - last)
    order = np.argsort(-(last - first) * keys, kind="stable")
    tasks = np.empty((len(requests), num_kv_heads, 4), np.int32)
    for column, values in ((0, requests), (2, first), (3, last)):
        tasks[:, :, column] = values[order, None]
    tasks[:, :, 1] = np.arange(num_kv_heads)
    return AttentionWork(tasks.reshape(-1, 4), int(meta.seq_lens.max()))
