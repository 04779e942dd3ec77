"""Fetches keys and values while products are computed, which leave memory idle.

Products of several rows wait for the processor's multipliers, attention of single queries for
memory. So while a recorded step multiplies, what the next attention will read is brought into the
caches. Blocks are listed once a step, as they are the same in all layers. Each product has a share
of every part of the list and spreads it over its tiles, so a thread fetches what, for the most
part, it will itself read.

This changes no number. The first layer's products go by the list of the step before: some blocks
are fetched for nothing, or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import numpy as np
import numpy.typing as npt

from rawpaged.backend import AttentionPlan, KVCache
from rawpaged.cpu.fetch_lists import (
    BEGIN,
    END,
    KEY_BYTES,
    KEYS,
    SHARE_WORDS,
    VALUE_BYTES,
    VALUES,
    WHOLE,
    list_blocks,
)
from rawpaged.cpu.threads import ThreadTeam

MOST_BYTES = 8 << 20
"""Of a layer's keys and values that are fetched; a last-level cache keeps them until their use."""
_MOST_BLOCKS = 1 << 14

Words = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int32]
Share = tuple[Blocks, Words]
"""What a product fetches, for `list_pieces`: the blocks of a step, and the fields of a share."""

_P = ParamSpec("_P")


class KVAhead:
    """Gives the products of a recorded step their shares."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team
        self._blocks = np.zeros(1 + _MOST_BLOCKS, np.int32)  # how many, then these
        self._is_recording = False
        self._is_listed = False
        self._waiting: list[tuple[Words, int]] = []
        """Shares whose attention is not known yet, and the work of their products."""
        self._first: KVCache | None = None

    def recording(self, forward: Callable[_P, None]) -> Callable[_P, None]:
        """`forward`, within which products get shares: to be called for each recording."""

        def with_shares(*args: _P.args, **kwargs: _P.kwargs) -> None:
            self._is_recording, self._is_listed, self._first = True, False, None
            try:
                forward(*args, **kwargs)
                if self._first is not None:
                    # The next step begins with the layer that this one began with.
                    self._assign(self._first)
            finally:
                self._is_recording, self._first = False, None
                self._waiting.clear()

        return with_shares

    def share(self, work: int) -> Share:
        """A product's; nothing outside recordings. Products share in proportion to their work."""
        share = np.zeros(SHARE_WORDS, np.int64)
        if self._is_recording:
            self._waiting.append((share, work))
        return self._blocks, share

    def before_attention(self, cache: KVCache, plan: AttentionPlan, window: int | None) -> None:
        """Products since the last attention fetch what this one reads, unless it reads a window."""
        if not self._is_recording:
            return
        if window is not None:
            self._waiting.clear()
            return
        if not self._is_listed:
            self._is_listed = True
            self._first = cache
            self._list(cache, plan)
        self._assign(cache)

    def _list(self, cache: KVCache, plan: AttentionPlan) -> None:
        block_bytes = cache.keys.strides[0] + cache.values.strides[0]
        self._team.run(
            list_blocks,
            np.ones(1, np.int64),
            self._blocks,
            plan.work.tasks,
            plan.work.num_tasks,
            plan.block_tables,
            plan.seq_lens,
            cache.block_size,
            min(_MOST_BLOCKS, MOST_BYTES // block_bytes),
        )

    def _assign(self, cache: KVCache) -> None:
        total = sum(work for _, work in self._waiting)
        done = 0
        for share, work in self._waiting:
            share[KEYS], share[VALUES] = cache.keys.ctypes.data, cache.values.ctypes.data
            share[KEY_BYTES], share[VALUE_BYTES] = cache.keys.strides[0], cache.values.strides[0]
            share[BEGIN] = WHOLE * done // total
            done += work
            share[END] = WHOLE * done // total
        self._waiting.clear()
