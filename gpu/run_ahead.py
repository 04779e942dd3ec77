"""Sampling whose ids stay on the device for the next step, while a copy goes to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import DrawnTokens, SamplingRows, TokenLogprobRows
from rawpaged.gpu import grids
from rawpaged.gpu.arrays import array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.module import Function
from rawpaged.gpu.numba_kernels import make_take_token_ids
from rawpaged.gpu.packing import Layout, ReusedMemory, upload_together
from rawpaged.gpu.sampling import DeviceLogprobRows, DeviceSamplingRows, Sampling

_LEAST_BYTES = 4096


class TakeTokenIds:
    """Puts drawn tokens where a step refers to them."""

    def __init__(self, device: Device) -> None:
        self._kernel: Function = device.jit(make_take_token_ids())

    def __call__(self, token_ids: Any, drawn: Any) -> None:
        """token_ids[t] = max(drawn[-1 - token_ids[t]], 0) where token_ids[t] is negative.

        Both are contiguous i32 vectors; -1 - token_ids[t] is within drawn.
        """
        ids, source = array_info(token_ids), array_info(drawn)
        check(
            ids.dtype == source.dtype == "int32"
            and len(ids.shape) == len(source.shape) == 1
            and ids.is_contiguous
            and source.is_contiguous,
            token_ids=token_ids,
            drawn=drawn,
        )
        if ids.shape[0] > 0:
            grid, block = grids.elements(ids.shape[0])
            self._kernel(grid, block, (token_ids, drawn))


class SampleAhead:
    """A RunAhead (rawpaged.backend): what is drawn is in one device array, and behind it in pinned
    memory, for one sampling at a time."""

    def __init__(
        self,
        device: Device,
        take_token_ids: TakeTokenIds,
        sampling: Callable[[int], Sampling],
        memory: tuple[ReusedMemory, ReusedMemory],
        max_rows: int,
    ) -> None:
        """`sampling` gives the kernels for a size of vocabulary, `memory` is for their inputs and
        for log-probabilities."""
        self._device = device
        self._take_token_ids = take_token_ids
        self._sampling = sampling
        self._drawn = device.empty((max_rows,), "int32")
        self._inputs, self._tables = memory
        self._pinned = np.empty(0, np.uint8)

    def mark(self) -> Callable[[], None]:
        return self._device.record().synchronize

    def take_token_ids(self, token_ids: Any) -> None:
        self._take_token_ids(token_ids, self._drawn)

    def sample(
        self, logits: Any, rows: SamplingRows, *, reported: Any, num_logprobs: int | None
    ) -> Callable[[], DrawnTokens]:
        num_rows, vocab_size = logits.shape
        arrays = [getattr(rows, each.name) for each in fields(rows)]
        inputs = DeviceSamplingRows(*upload_together(self._device, arrays, self._inputs))
        drawn = self._drawn[:num_rows]
        sampling = self._sampling(vocab_size)
        sampling.sample(drawn, logits, inputs)
        layout = Layout()
        if num_logprobs is not None:
            add_logprobs(layout, num_rows, num_logprobs)
        table = self._tables.take(layout.nbytes)
        if num_logprobs is not None:
            sampling.token_logprobs(DeviceLogprobRows(**layout.views(table)), reported, drawn)
        return self._fetch(drawn, table, layout)

    def _fetch(self, drawn: Any, table: Any, layout: Layout) -> Callable[[], DrawnTokens]:
        """Queue the copies to the host; what it returns waits for them."""
        num_rows, nbytes = drawn.shape[0], layout.nbytes
        pinned = self._take_pinned(nbytes + 4 * num_rows)
        on_host, ids = pinned[:nbytes], pinned[nbytes:].view(np.int32)
        if nbytes > 0:
            self._device.fetch(on_host, table)
        self._device.fetch(ids, drawn)
        done = self._device.record()

        def wait() -> DrawnTokens:
            done.synchronize()
            views = layout.views(on_host.copy())
            return DrawnTokens(ids.copy(), TokenLogprobRows(**views) if views else None)

        return wait

    def _take_pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory that nothing is being copied to, as nobody waits for what was."""
        if len(self._pinned) < nbytes:
            size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
            self._pinned = self._device.pinned_buffer(size)
        return self._pinned[:nbytes]


def add_logprobs(layout: Layout, num_rows: int, k: int) -> None:
    """Places of the fields of TokenLogprobRows, which are those of DeviceLogprobRows."""
    layout.add("chosen", "float32", (num_rows,))
    layout.add("ranks", "int32", (num_rows,))
    layout.add("top_token_ids", "int32", (num_rows, k))
    layout.add("top_logprobs", "float32", (num_rows, k))
