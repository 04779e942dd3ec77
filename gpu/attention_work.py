"""How one step's attention is cut into pieces of work, on the host, once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.errors import BackendError


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Requests with one query whose partitions fit the workspace together.

    Arrays are NumPy's as planned, and the device's after `AttentionWork.upload`. A captured graph
    is replayed with other contents of arrays that are large enough: `sizes` says what is used. It
    is captured with `is_split`, and the numbers of rows of those arrays.
    """

    items: Any  # i32[num_items, 2]: request and partition, a request's in order
    requests: Any  # i32[num_requests]
    first_items: Any  # i32[num_requests], row of items where a request's begin
    sizes: Any  # i32[2]: numbers of items and requests in use
    num_items: int
    num_requests: int
    is_split: bool
    """Whether a request has several partitions, whose results have to be combined."""


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's work: rounds of decode one after the other, and tiles of prefill."""

    rounds: tuple[DecodeWork, ...]
    tiles: Any  # i32[num_tiles, 4]: request, first row, number of rows, first query's position
    num_tiles: int

    def upload(self, to_device: Callable[[npt.NDArray[np.int32]], Any]) -> AttentionWork:
        """The same work with its arrays passed through `to_device`."""
        rounds = tuple(
            replace(
                part,
                items=to_device(part.items),
                requests=to_device(part.requests),
                first_items=to_device(part.first_items),
                sizes=to_device(part.sizes),
            )
            for part in self.rounds
        )
        tiles = to_device(self.tiles) if self.num_tiles > 0 else None
        return AttentionWork(rounds, tiles, self.num_tiles)


def max_decode_items(max_num_reqs: int, max_model_len: int, *, partition_tokens: int) -> int:
    """Rows of a workspace that holds any batch in one round."""
    return max_num_reqs * -(-max_model_len // partition_tokens)


def split_work(
    query_start_loc: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    *,
    group: int,
    tile_rows: int,
    partition_tokens: int,
    max_items: int,
    is_prefill: npt.NDArray[np.bool_] | None = None,
) -> AttentionWork:
    """Partitions of requests with one query and tiles of the others; NumPy arrays.

    `is_prefill` bool[num_reqs] tells which get tiles; the rest have one query. None: those with
    more than one.

    `group` is query heads a KV head, `tile_rows` what a prefill block takes, `max_items` the rows
    of the workspace. Requests without queries get no work. Raises BackendError when a request
    alone has more partitions than that.
    """
    queries = np.diff(query_start_loc)
    tiled = queries > 1 if is_prefill is None else is_prefill & (queries > 0)
    single = np.flatnonzero((queries == 1) & ~tiled)
    partitions = -(-seq_lens[single] // partition_tokens)
    if partitions.size and partitions.max() > max_items:
        raise BackendError(
            f"{int(seq_lens[single].max())} tokens need {int(partitions.max())} partitions, but "
            f"the workspace holds {max_items}"
        )
    rounds = tuple(_decode_rounds(single, partitions, max_items))
    tiles = _prefill_tiles(np.flatnonzero(tiled), queries, seq_lens, group, tile_rows)
    return AttentionWork(rounds, tiles, len(tiles))


def _decode_rounds(
    requests: npt.NDArray[np.intp], partitions: npt.NDArray[Any], max_items: int
) -> Iterator[DecodeWork]:
    first = 0
    while first < len(requests):
        ends = np.cumsum(partitions[first:])
        count = int(np.searchsorted(ends, max_items, side="right"))
        own, parts = requests[first : first + count], partitions[first : first + count]
        first_items = ends[:count] - parts
        total = int(ends[count - 1])
        items = np.empty((total, 2), np.int32)
        items[:, 0] = np.repeat(own, parts)
        items[:, 1] = np.arange(total) - np.repeat(first_items, parts)
        yield DecodeWork(
            items,
            own.astype(np.int32),
            first_items.astype(np.int32),
            np.array([total, count], np.int32),
            total,
            count,
            total > count,
        )
        first += count


def _prefill_tiles(
    requests: npt.NDArray[np.intp],
    queries: npt.NDArray[Any],
    seq_lens: npt.NDArray[Any],
    group: int,
    tile_rows: int,
) -> npt.NDArray[np.int32]:
    """Tiles of each request's rows, those with the most keys first: they end last."""
    rows = queries[requests] * group
    counts = -(-rows // tile_rows)
    owner = np.repeat(np.arange(len(requests)), counts)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_row = index * tile_rows
    num_rows = np.minimum(rows[owner] - first_row, tile_rows)
    start = (seq_lens - queries)[requests][owner]
    tiles = np.stack([requests[owner], first_row, num_rows, start], axis=1).astype(np.int32)
    last_key = start + (first_row + num_rows - 1) // group
    return np.ascontiguousarray(tiles[np.argsort(-last_key, kind="stable")])
