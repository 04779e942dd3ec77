"""Changes to logits before sampling: biases, penalties and grammars' masks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rawpaged.backend import LogitEdits
from rawpaged.gpu import grids
from rawpaged.gpu.arrays import array_info, check
from rawpaged.gpu.device import Device
from rawpaged.gpu.numba_kernels import make_edit_logits, make_mask_logits
from rawpaged.gpu.packing import ReusedMemory, upload_together


class EditLogits:
    """Applies rawpaged.backend.LogitEdits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = ReusedMemory(device)
        self._kernel = device.jit(make_edit_logits())

    def __call__(self, logits: Any, edits: LogitEdits) -> None:
        """Change logits f32[num_rows, vocab_size] in place; the edits come from the host."""
        info = array_info(logits)
        check(
            info.dtype == "float32"
            and len(info.shape) == 2
            and edits.repetition_penalty.shape == info.shape[:1],
            logits=logits,
            repetition_penalty=edits.repetition_penalty,
        )
        if len(edits.rows) > 0:
            arrays = [getattr(edits, field.name) for field in fields(edits)]
            grid, block = grids.elements(len(edits.rows))
            on_device = upload_together(self._device, arrays, self._memory)
            self._kernel(grid, block, (logits, *on_device))


class MaskLogits:
    """Forbids the tokens that a grammar does not allow.

    No op of the engine calls it yet: guided decoding is not built.
    """

    def __init__(self, device: Device) -> None:
        self._kernel = device.jit(make_mask_logits())

    def __call__(self, logits: Any, masks: Any, rows: Any) -> None:
        """logits f32[num_rows, vocab_size], row rows[j], = -inf where masks[j] has bit 0.

        masks i32[m, ceil(vocab_size / 32)]: token i has bit i % 32 of word i // 32, 1 allows it.
        rows i32[m], each once.
        """
        info, words, picked = array_info(logits), array_info(masks), array_info(rows)
        check(
            info.dtype == "float32"
            and len(info.shape) == 2
            and (words.dtype, picked.dtype) == ("int32", "int32")
            and words.shape == (*picked.shape, -(-info.shape[1] // 32)),
            logits=logits,
            masks=masks,
            rows=rows,
        )
        if 0 not in words.shape:
            grid, block = grids.rows(words.shape[0], info.shape[1])
            self._kernel(grid, block, (logits, masks, rows))
