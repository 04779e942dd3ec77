"""Cuts the attention of a step into tasks that threads take as they come.

A task is a tile of queries of one request and one KV head. It goes through the keys in partitions
of PARTITION positions and joins the results one after the other. Where there are too few tasks for
the threads, single queries over many partitions are split: their tasks leave the results of
partitions in slots, and merges join them in the same order. That is the same arithmetic, so how
tasks are cut cannot be seen in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rawpaged.backend import BatchMeta

TILE_ROWS = 30
"""Query rows of a task at most, unless one token has more query heads in a group."""
PARTITION = 256
"""Keys of a partition: their scores, for a tile's rows, fit the first-level cache."""
MAX_SLOTS = 1024
"""Partitions of split tasks in one step."""
_TASKS_A_THREAD = 4

REQUEST, HEAD, FIRST, LAST, FIRST_PARTITION, LAST_PARTITION, SLOT = range(7)
"""Columns of a task: rows [FIRST, LAST), partitions [FIRST_PARTITION, LAST_PARTITION); the slot
of its first partition, or -1 for a task that joins them itself."""
TASK_FIELDS = 7
ROW, MERGE_HEAD, FIRST_SLOT, NUM_SLOTS = range(4)
"""Columns of a merge."""
MERGE_FIELDS = 4


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Tasks of one step, the costliest first, so that the last to be taken are short."""

    tasks: npt.NDArray[np.int32]  # i32[capacity, TASK_FIELDS]
    num_tasks: npt.NDArray[np.int64]  # i64[1]
    merges: npt.NDArray[np.int32]  # i32[capacity, MERGE_FIELDS]
    num_merges: npt.NDArray[np.int64]  # i64[1]


def most_tasks(num_reqs: int, num_kv_heads: int) -> int:
    """Tasks of a step of one query a request, at most."""
    return num_reqs * num_kv_heads + MAX_SLOTS


def split_work(
    meta: BatchMeta, num_heads: int, num_kv_heads: int, num_threads: int
) -> AttentionWork:
    """All tasks of a batch, and the merges of those that are split."""
    tasks, costs = _tiles(meta, num_heads, num_kv_heads)
    order = np.argsort(-costs, kind="stable")
    tasks = tasks[order]
    merges = np.empty((0, MERGE_FIELDS), np.int32)
    if num_threads > 1:
        tasks, merges = _split_long(tasks, num_threads)
    return AttentionWork(
        tasks, np.array([len(tasks)]), merges, np.array([len(merges)], dtype=np.int64)
    )


def _tiles(
    meta: BatchMeta, num_heads: int, num_kv_heads: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """A task for each tile of each request and KV head, and what it costs."""
    tile = max(1, TILE_ROWS // (num_heads // num_kv_heads))
    begins, ends = meta.query_start_loc[:-1], meta.query_start_loc[1:]
    num_tiles = -(-(ends - begins) // tile)
    requests = np.repeat(np.arange(len(begins), dtype=np.int32), num_tiles)
    tile_in_request = np.arange(len(requests)) - (np.cumsum(num_tiles) - num_tiles)[requests]
    first = begins[requests] + tile * tile_in_request
    last = np.minimum(first + tile, ends[requests])
    keys = meta.seq_lens[requests] - (ends[requests] - last)
    tasks = np.empty((len(requests), num_kv_heads, TASK_FIELDS), np.int32)
    columns = {REQUEST: requests, FIRST: first, LAST: last, LAST_PARTITION: -(-keys // PARTITION)}
    for column, values in columns.items():
        tasks[:, :, column] = values[:, None]
    tasks[:, :, HEAD] = np.arange(num_kv_heads)
    tasks[:, :, FIRST_PARTITION] = 0
    tasks[:, :, SLOT] = -1
    costs = np.repeat((last - first).astype(np.int64) * keys, num_kv_heads)
    return tasks.reshape(-1, TASK_FIELDS), costs


def _split_long(
    tasks: npt.NDArray[np.int32], num_threads: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The tasks, single queries of many partitions in pieces; and the merges of these."""
    partitions = tasks[:, LAST_PARTITION]
    share = -(-int(partitions.sum()) // (_TASKS_A_THREAD * num_threads))
    is_long = (partitions > share) & (tasks[:, LAST] - tasks[:, FIRST] == 1)
    long = np.flatnonzero(is_long & (np.cumsum(np.where(is_long, partitions, 0)) <= MAX_SLOTS))
    pieces: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    slot = 0
    for request, head, first, last, _, count, _ in tasks[long].tolist():
        merges.append((first, head, slot, count))
        for begin in range(0, count, share):
            end = min(begin + share, count)
            pieces.append((request, head, first, last, begin, end, slot + begin))
        slot += count
    if not pieces:
        return tasks, np.empty((0, MERGE_FIELDS), np.int32)
    whole = np.delete(tasks, long, axis=0)
    return np.concatenate([np.array(pieces, np.int32), whole]), np.array(merges, np.int32)
