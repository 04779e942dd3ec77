"""Plans of decode steps whose arrays keep their addresses, so that graphs can be replayed.

All arrays of a plan lie in one device buffer behind one host buffer: filling it is one copy. Plans
may share the buffer, as each fills it anew before it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rawpaged.backend import AttentionPlan, DecodeBatch
from rawpaged.gpu.attention import PagedAttention
from rawpaged.gpu.attention_work import AttentionWork, DecodeWork
from rawpaged.gpu.device import Device
from rawpaged.gpu.packing import Layout


class DecodePlan:
    """A StaticPlan (rawpaged.backend) for up to `num_reqs` requests of one token.

    Rows without a request have token 0 at position 0, a slot that is not stored, and no queries
    for attention to compute.
    """

    def __init__(
        self,
        device: Device,
        attention: PagedAttention,
        *,
        num_reqs: int,
        max_blocks: int,
        max_items: int,
        buffer: Any = None,
    ) -> None:
        self._device = device
        self._attention = attention
        self.num_reqs = num_reqs
        self._layout = Layout()
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "slot_mapping": ("int64", (num_reqs,)),
            "token_ids": ("int32", (num_reqs,)),
            "positions": ("int32", (num_reqs,)),
            "query_start_loc": ("int32", (num_reqs + 1,)),
            "seq_lens": ("int32", (num_reqs,)),
            "block_tables": ("int32", (num_reqs, max_blocks)),
            "logits_rows": ("int32", (num_reqs,)),
            "items": ("int32", (max_items, 2)),
            "requests": ("int32", (num_reqs,)),
            "first_items": ("int32", (num_reqs,)),
            "sizes": ("int32", (2,)),
        }
        for name, (dtype, shape) in shapes.items():
            self._layout.add(name, dtype, shape)
        self._host_bytes = np.zeros(self._layout.nbytes, np.uint8)
        if buffer is None or buffer.shape[0] < self._layout.nbytes:
            buffer = device.empty((self._layout.nbytes,), "uint8")
        self.buffer = buffer
        """u8[...] on the device; another plan that is as large or smaller may lie in it too."""
        self._device_bytes = buffer[: self._layout.nbytes]
        self._host = self._layout.views(self._host_bytes)
        self._host["logits_rows"][:] = np.arange(num_reqs)
        self.plan = self._make_plan(max_items)
        self._clear()
        device.write(self._device_bytes, self._host_bytes)

    def fill(self, batch: DecodeBatch) -> bool:
        """Put a batch of at most `num_reqs` requests with one token each in.

        False, and nothing changed, if attention would take more than one round of its workspace.
        """
        n = len(batch.token_ids)
        assert n <= self.num_reqs, f"{n=} {self.num_reqs=}"
        positions = np.array(batch.positions, np.int32)
        work = self._attention.plan(np.arange(n + 1, dtype=np.int32), positions + 1)
        assert work.num_tiles == 0, "a request has several tokens"
        if len(work.rounds) > 1:
            return False
        self._clear()
        host = self._host
        host["token_ids"][:n] = batch.token_ids
        host["positions"][:n] = positions
        host["slot_mapping"][:n] = batch.slots
        host["seq_lens"][:n] = positions + 1
        host["query_start_loc"][: n + 1] = np.arange(n + 1)
        # Rows without a request begin and end where the last one does.
        host["query_start_loc"][n + 1 :] = n
        for row, table in enumerate(batch.block_tables):
            host["block_tables"][row, : len(table)] = table
        self._fill_work(work.rounds[0])
        self._device.write(self._device_bytes, self._host_bytes)
        return True

    def _fill_work(self, work: DecodeWork) -> None:
        host = self._host
        host["items"][: work.num_items] = work.items
        host["requests"][: work.num_requests] = work.requests
        host["first_items"][: work.num_requests] = work.first_items
        host["sizes"][:] = work.sizes

    def _clear(self) -> None:
        for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "sizes"):
            self._host[name][...] = 0
        self._host["slot_mapping"][...] = -1

    def _make_plan(self, max_items: int) -> AttentionPlan:
        arrays = self._layout.views(self._device_bytes)
        decode = DecodeWork(
            items=arrays["items"],
            requests=arrays["requests"],
            first_items=arrays["first_items"],
            sizes=arrays["sizes"],
            num_items=max_items,
            num_requests=self.num_reqs,
            is_split=max_items > self.num_reqs,
        )
        return AttentionPlan(
            token_ids=arrays["token_ids"],
            positions=arrays["positions"],
            slot_mapping=arrays["slot_mapping"],
            query_start_loc=arrays["query_start_loc"],
            seq_lens=arrays["seq_lens"],
            block_tables=arrays["block_tables"],
            logits_rows=arrays["logits_rows"],
            num_tokens=self.num_reqs,
            work=AttentionWork((decode,), None, 0),
        )
