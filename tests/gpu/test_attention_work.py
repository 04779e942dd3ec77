"""How a batch is split into partitions and tiles."""

from __future__ import annotations

import numpy as np
import pytest

from rawpaged.errors import BackendError
from rawpaged.gpu.attention import PrefillTile, head_tiles
from rawpaged.gpu.attention_work import AttentionWork, max_decode_items, split_work
from rawpaged.gpu.kv_cache import HEAD_DIMS

MOST_SHARED_BYTES = 99 * 1024
"""Of a block on the smallest GPUs with bf16 tensor cores (compute capability 8.6, 8.9, 12.0)."""


def split(
    queries: list[int], seq_lens: list[int], *, group: int = 3, max_items: int = 100
) -> AttentionWork:
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return split_work(
        starts,
        np.array(seq_lens, np.int32),
        group=group,
        tile_rows=64,
        partition_tokens=32,
        max_items=max_items,
    )


def test_each_partition_of_single_queries_once() -> None:
    work = split([1, 5, 1, 1], [64, 9, 1, 65])
    (part,) = work.rounds
    assert part.items.tolist() == [[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert part.requests.tolist() == [0, 2, 3]
    assert part.first_items.tolist() == [0, 2, 3]
    assert part.sizes.tolist() == [part.num_items, part.num_requests] == [6, 3]
    assert part.is_split
    assert not split([1, 1], [32, 5]).rounds[0].is_split


def test_each_row_of_several_queries_once_and_long_contexts_first() -> None:
    work = split([50, 1, 2], [60, 9, 400])
    assert work.tiles.tolist() == [
        [2, 0, 6, 398],
        [0, 128, 22, 10],
        [0, 64, 64, 10],
        [0, 0, 64, 10],
    ]
    assert work.num_tiles == 4


def test_rounds_hold_what_fits_and_end_with_all() -> None:
    work = split([1] * 5, [64, 32, 96, 10, 96], max_items=3)
    assert [part.requests.tolist() for part in work.rounds] == [[0, 1], [2], [3], [4]]
    assert [part.first_items.tolist() for part in work.rounds] == [[0, 2], [0], [0], [0]]


def test_a_request_that_does_not_fit_alone_is_refused() -> None:
    with pytest.raises(BackendError, match=r"129 tokens need 5 partitions.*holds 4"):
        split([1, 1], [5, 129], max_items=4)
    assert max_decode_items(2, 129, partition_tokens=32) == 10


def test_batches_without_one_kind() -> None:
    assert split([1], [9]).num_tiles == 0
    assert split([2], [9]).rounds == ()
    for nothing in (split([0], [9]), split([], [])):
        assert nothing.rounds == ()
        assert nothing.num_tiles == 0


def test_upload_passes_every_array_through() -> None:
    seen: list[int] = []

    def to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> str:
        assert array.flags.c_contiguous
        assert array.dtype == np.int32
        seen.append(array.size)
        return f"device {array.size}"

    work = split([1, 5], [64, 9]).upload(to_device)
    assert work.rounds[0].items == "device 4"
    assert work.tiles == "device 4"
    assert sorted(seen) == [1, 1, 2, 4, 4]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_every_gpu(head_dim: int) -> None:
    for itemsize in (1, 2):
        assert PrefillTile.of(head_dim).shared_bytes(head_dim, itemsize) <= MOST_SHARED_BYTES
    # Accumulators of all heads of a block: half of a thread's 255 registers at most.
    assert head_tiles(16, head_dim) * head_dim // 4 <= 64
