"""Sampling as an op: steps of the same requests differ in nothing but what the arrays hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rawpaged.backend import SamplingRows
from rawpaged.cpu.linear import ROW_GRAIN
from rawpaged.cpu.sampling import sample_rows
from rawpaged.cpu.threads import PerRow, Recording, ThreadTeam


class SamplingOp:
    """Keeps its last call, which is repeated if the next one has the same arrays."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team
        self._last: tuple[npt.NDArray[np.float32], SamplingRows, Recording] | None = None
        self._out = np.empty(0, np.int32)

    def __call__(
        self, logits: npt.NDArray[np.float32], rows: SamplingRows
    ) -> npt.NDArray[np.int32]:
        """One token id a row of logits f32[n, vocab_size]; see rawpaged.backend.Backend.sample."""
        last = self._last
        if last is None or last[0] is not logits or last[1] is not rows:
            last = self._last = logits, rows, self._record(logits, rows)
        self._team.replay(last[2])
        return self._out.copy()

    def forget(self) -> None:
        """Keep no arrays any longer."""
        self._last = None

    def _record(self, logits: npt.NDArray[np.float32], rows: SamplingRows) -> Recording:
        out = self._out = np.empty(len(logits), np.int32)
        grain = max(1, ROW_GRAIN * len(logits) // max(1, logits.size))
        return self._team.record(
            lambda: self._team.run(
                sample_rows,
                PerRow(len(logits)),
                out,
                logits,
                rows.temperature,
                rows.top_k,
                rows.top_p,
                rows.min_p,
                rows.seeds,
                rows.positions,
                rows.sample_indices,
                grain=grain,
            )
        )
