"""What nsys and ncu see of a profile: where it begins and ends, and NVTX ranges inside.

`cudaProfilerStart` and `cudaProfilerStop` bound what a profiler records that was started with
`nsys profile --capture-range=cudaProfilerApi`; without a profiler they and NVTX do nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from rawpaged.tracing import RangeArgs, RangeKind

logger = logging.getLogger(__name__)

_COLOURS: dict[RangeKind, int] = {"step": 0, "phase": 1, "layer": 2, "op": 3}
"""Indices into CuPy's table of colours."""


class NvtxRanges:
    """A RangeSink over `cupy.cuda.nvtx`; ranges lie on the thread that calls."""

    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx
        self._kinds: list[RangeKind] = []

    def push(self, kind: RangeKind, name: str, args: RangeArgs) -> None:
        self._kinds.append(kind)
        self._nvtx.RangePush(name, _COLOURS[kind])

    def rename(self, name: str, args: RangeArgs) -> None:
        # NVTX cannot name a range anew. So a step shows as two in a row: `step=812` up to where
        # its batch is known, then `step=812 prefill=3x512 decode=29`.
        kind = self._kinds[-1]
        self.pop()
        self.push(kind, name, args)

    def pop(self) -> None:
        self._kinds.pop()
        self._nvtx.RangePop()


class CudaProfiler:
    """Starts and stops whatever profiler is attached to this process."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def start(self) -> NvtxRanges:
        self._call(self._cupy.cuda.runtime.profilerStart)
        return NvtxRanges(self._cupy.cuda.nvtx)

    def stop(self) -> None:
        self._call(self._cupy.cuda.runtime.profilerStop)

    def _call(self, function: Any) -> None:
        """Serving goes on where profiling is not possible, as under another profiler."""
        try:
            function()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            logger.warning("the CUDA profiler could not be switched: %s", error)
