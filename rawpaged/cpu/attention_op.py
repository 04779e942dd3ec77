"""Attention as an op: the kernels' arguments, and room for what tasks leave to be joined."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rawpaged.backend import AttentionPlan, KVCache
from rawpaged.cpu.arguments import RowsOf
from rawpaged.cpu.attention import ATTENTION_KERNELS, merge_slots
from rawpaged.cpu.attention_work import MAX_SLOTS, AttentionWork
from rawpaged.cpu.kv_cache import scales_of
from rawpaged.cpu.linear_inputs import Input, target_of
from rawpaged.cpu.products import Arithmetic
from rawpaged.cpu.threads import ThreadTeam

Float32 = npt.NDArray[np.float32]

_LOG2_E = 1.4426950408889634
"""Weights are powers of two."""


class AttentionOp:
    """Attention of a planned step; keeps room for split tasks."""

    def __init__(self, team: ThreadTeam, pairs: Arithmetic) -> None:
        """`pairs` is the arithmetic for caches of pairs; that for float32 is float32."""
        self._team = team
        self._pairs = pairs
        self._room: dict[tuple[int, int], tuple[Float32, Float32]] = {}

    def __call__(
        self,
        out: Input,
        q: Float32,
        cache: KVCache,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        work: AttentionWork = plan.work
        slot_states, slot_values = self._slots(q.shape[1] // cache.keys.shape[1], cache)
        key_scale, value_scale = scales_of(cache)
        arithmetic: Arithmetic = "float32" if cache.keys.shape[4] == 1 else self._pairs
        self._team.run(
            ATTENTION_KERNELS[arithmetic],
            work.num_tasks,
            target_of(out),
            RowsOf(q),
            cache.keys,
            cache.values,
            key_scale,
            value_scale,
            plan.positions,
            plan.block_tables,
            work.tasks,
            slot_states,
            slot_values,
            np.float32(scale * _LOG2_E),
            sliding_window or 0,
        )
        self._team.run(
            merge_slots,
            work.num_merges,
            target_of(out),
            work.merges,
            slot_states,
            slot_values,
            value_scale,
            q.shape[2],
        )

    def _slots(self, group: int, cache: KVCache) -> tuple[Float32, Float32]:
        """Room that all layers use; the system gives it when it is first written."""
        width = cache.values.shape[3]
        if (group, width) not in self._room:
            self._room[group, width] = (
                np.empty((MAX_SLOTS, group, 2), np.float32),
                np.empty((MAX_SLOTS, group, width), np.float32),
            )
        return self._room[group, width]
