"""A team of threads that share the work of one op at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from rawpaged.cpu.signals import Signal
from rawpaged.errors import ConfigError

MAX_THREADS = 256


def usable_processors() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ThreadTeam:
    """`run` splits an index range over the caller and `num_threads - 1` helpers.

    Numba's own thread pools abort the process when two Python threads use them at once and live
    as long as the process; this one belongs to an engine and ends with it. Kernels release the
    GIL. One thread at a time may call `run`.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or usable_processors()
        if self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads={num_threads} is more than {MAX_THREADS}")
        self._helpers = [_Helper(i + 1) for i in range(self.num_threads - 1)]

    def run(self, kernel: Callable[..., None], count: int, *args: Any, grain: int = 1) -> None:
        """kernel(*args, start, stop) over disjoint ranges that make up [0, count).

        Ranges are at least `grain` long, so that little work is not handed out at all.
        """
        parts = max(1, min(self.num_threads, count // max(grain, 1)))
        bounds = [count * part // parts for part in range(parts + 1)]
        self.run_ranges(kernel, bounds, *args)

    def run_ranges(self, kernel: Callable[..., None], bounds: list[int], *args: Any) -> None:
        """kernel(*args, bounds[i], bounds[i + 1]) for each i, at most one a thread."""
        helpers = self._helpers[: len(bounds) - 2]
        for i, helper in enumerate(helpers):
            helper.start(kernel, (*args, bounds[i + 1], bounds[i + 2]))
        try:
            kernel(*args, bounds[0], bounds[1])
        finally:
            failures = [helper.join() for helper in helpers]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the helpers. The team must not be used afterwards."""
        for helper in self._helpers:
            helper.close()


class _Helper:
    """One thread that runs what it is given."""

    def __init__(self, number: int) -> None:
        self._task: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        self._failure: BaseException | None = None
        self._work = Signal()
        self._done = Signal()
        self._thread = threading.Thread(
            target=self._serve, name=f"rawpaged-cpu-{number}", daemon=True
        )
        self._thread.start()

    def start(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._task = (kernel, args)
        self._work.raise_()

    def join(self) -> BaseException | None:
        """Wait for the task that was started; what it raised."""
        self._done.wait()
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        self._task = None
        self._work.raise_()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._work.wait()
            task, self._task = self._task, None
            if task is None:
                return
            kernel, args = task
            try:
                kernel(*args)
            except BaseException as failure:  # handed to the thread that called run
                self._failure = failure
            # Nothing of the task is kept: its arrays may be an engine's KV pool.
            del task, kernel, args
            self._done.raise_()
