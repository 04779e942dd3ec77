"""Has the system give the pages of KV pools before they are written.

A page that is written for the first time stops an op while the system clears it: for 2 MB some
tenths of a millisecond, and several milliseconds where the host of a virtual machine has to find
the memory too. Each layer's keys and values begin a page at about the same time, so a step would
stop for all of them.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from rawpaged.cpu.arguments import address_of
from rawpaged.cpu.weight_memory import LARGE_PAGE

logger = logging.getLogger(__name__)

_MOST_BYTES_AHEAD = 256 << 20
_SHARE_AHEAD = 8
"""At most an eighth of the pools is taken ahead, as they may never be needed."""
_IDLE_SECONDS = 0.05
"""Without a step for so long, the processors have time for it."""
_LONGEST_WAIT = 0.25
"""Seconds between looks whether steps have come to an end."""
_MADV_POPULATE_WRITE = 23
"""Of <linux/mman.h>, since Linux 5.14: like a write, but the content stays as it is."""


class PagesAhead:
    """A thread that takes pages of the pools some way ahead of the blocks in use.

    While steps follow each other it takes only what is about to be written: what it costs the
    processors is the same then as if a step did it.
    """

    def __init__(self, pools: Sequence[npt.NDArray[Any]]) -> None:
        """Pools [num_blocks, ...], each one contiguous; blocks are used from the first on."""
        self._pools = pools
        self._block_bytes = max(pool.strides[0] for pool in pools)
        all_bytes = sum(pool.nbytes for pool in pools)
        ahead = min(_MOST_BYTES_AHEAD, all_bytes // _SHARE_AHEAD)
        self._num_ahead = ahead // sum(pool.strides[0] for pool in pools)
        self._num_near = min(self._num_ahead, LARGE_PAGE // self._block_bytes // 2)
        self._num_reached = 0
        self._last_step = time.monotonic() - _IDLE_SECONDS
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rawpaged-pages", daemon=True)
        self._thread.start()

    def begin_step(self, num_reached_blocks: int) -> None:
        """Blocks from that one on have never been used, nor are they in this step."""
        self._last_step = math.inf
        if num_reached_blocks > self._num_reached:
            with self._changed:
                self._num_reached = num_reached_blocks
                self._changed.notify()

    def end_step(self) -> None:
        """Unless another one begins soon, the processors have time."""
        self._last_step = time.monotonic()

    def close(self) -> None:
        """Take no more; the pools are no longer held."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._pools = ()

    def _run(self) -> None:
        for first in range(0, max(pool.nbytes for pool in self._pools), LARGE_PAGE):
            for pool in self._pools:
                self._wait_for(first // self._block_bytes)
                if self._is_closed or not _take_page(pool, first):
                    return

    def _wait_for(self, block: int) -> None:
        """Until the block's page should be taken."""
        with self._changed:
            while not self._is_closed and block > self._num_reached + self._num_near:
                is_wanted = block <= self._num_reached + self._num_ahead
                rest = self._last_step + _IDLE_SECONDS - time.monotonic()
                if is_wanted and rest <= 0:
                    return
                self._changed.wait(min(rest, _LONGEST_WAIT) if is_wanted else None)


def pages_ahead(pools: Sequence[npt.NDArray[Any]]) -> PagesAhead | None:
    """None where pools are smaller than a page, or where the system takes pages by writes alone."""
    if sys.platform != "linux" or not pools or min(pool.nbytes for pool in pools) < LARGE_PAGE:
        return None
    return PagesAhead(pools)


def _take_page(pool: npt.NDArray[Any], first: int) -> bool:
    """Have the large page at byte `first`, if there is one; False if the system cannot."""
    size = min(LARGE_PAGE, pool.nbytes - first)
    if size <= 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(address_of(pool) + first)
    if libc.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
        return True
    # Of a kernel before 5.14, or without memory, where a write may still find some.
    logger.debug("no pages ahead of the KV pool: %s", os.strerror(ctypes.get_errno()))
    return False
