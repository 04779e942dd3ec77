"""Pages of KV pools are there before blocks are used, and no more of them than was asked for."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.cpu import pages_ahead
from rawpaged.cpu.pages_ahead import PagesAhead
from rawpaged.cpu.weight_memory import LARGE_PAGE, zeros
from tests.engine.resident_child import resident_bytes


def takes_pages() -> bool:
    """Whether this is Linux 5.14 or later, which can take pages that are not written and tell."""
    if sys.platform != "linux" or not Path("/proc/self/pagemap").exists():
        return False
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= (5, 14)


pytestmark = pytest.mark.skipif(
    not takes_pages(), reason="pages are taken ahead, and shown, by Linux 5.14 and later alone"
)

NUM_PAGES = 16
BLOCK_BYTES = LARGE_PAGE // 8


def new_pools() -> list[npt.NDArray[np.uint8]]:
    """Two pools of 128 blocks, of which an eighth, two pages, is taken ahead."""
    return [zeros((8 * NUM_PAGES, BLOCK_BYTES), np.uint8) for _ in range(2)]


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def pages_of(pools: list[npt.NDArray[Any]]) -> list[int]:
    return [resident_bytes(pool) // LARGE_PAGE for pool in pools]


def step(ahead: PagesAhead, num_reached_blocks: int) -> None:
    ahead.begin_step(num_reached_blocks)
    ahead.end_step()


def test_some_way_ahead_and_no_further() -> None:
    pools = new_pools()
    ahead = PagesAhead(pools)
    wait_until(lambda: pages_of(pools) == [3, 3])  # blocks 0 to 16
    step(ahead, 7)  # up to block 23, of the page that is there
    time.sleep(0.2)
    assert pages_of(pools) == [3, 3]
    step(ahead, 8)
    wait_until(lambda: pages_of(pools) == [4, 4])
    step(ahead, 5)
    step(ahead, 8 * NUM_PAGES)
    wait_until(lambda: pages_of(pools) == [NUM_PAGES, NUM_PAGES])
    ahead.close()


def test_only_what_is_near_during_a_step() -> None:
    pools = new_pools()
    ahead = PagesAhead(pools)
    wait_until(lambda: pages_of(pools) == [3, 3])
    ahead.begin_step(19)
    time.sleep(0.2)
    assert pages_of(pools) == [3, 3]
    ahead.begin_step(20)  # half a page before block 24
    wait_until(lambda: pages_of(pools) == [4, 4])
    time.sleep(0.2)
    assert pages_of(pools) == [4, 4]
    ahead.end_step()
    wait_until(lambda: pages_of(pools) == [5, 5])
    ahead.close()


def test_content_stays() -> None:
    pools = new_pools()
    pools[0][:, 5] = 7
    ahead = PagesAhead(pools)
    step(ahead, 8 * NUM_PAGES)
    wait_until(lambda: pages_of(pools) == [NUM_PAGES, NUM_PAGES])
    ahead.close()
    assert (pools[0][:, 5] == 7).all()
    assert int(pools[0].sum()) == 7 * 8 * NUM_PAGES
    assert not pools[1].any()


def test_nothing_more_once_closed() -> None:
    pools = new_pools()
    ahead = PagesAhead(pools)
    wait_until(lambda: pages_of(pools) == [3, 3])
    ahead.close()
    step(ahead, 8 * NUM_PAGES)
    time.sleep(0.2)
    assert pages_of(pools) == [3, 3]


def test_a_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come as they are written then."""
    monkeypatch.setattr(pages_ahead, "_MADV_POPULATE_WRITE", 12345)
    pools = new_pools()
    ahead = PagesAhead(pools)
    step(ahead, 8 * NUM_PAGES)
    time.sleep(0.2)
    assert pages_of(pools) == [0, 0]
    ahead.close()


def test_pools_of_less_than_a_page() -> None:
    assert pages_ahead.pages_ahead([np.zeros((4, 16), np.uint8)]) is None
    assert pages_ahead.pages_ahead([]) is None
