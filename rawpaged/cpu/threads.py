"""A team of threads that share the work of one op at a time."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

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
    as long as the process; this one belongs to an engine and ends with it. Helpers sleep between
    ops. Kernels release the GIL.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or usable_processors()
        if self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads={num_threads} is more than {MAX_THREADS}")
        self._tasks: list[queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]] = [
            queue.SimpleQueue() for _ in range(self.num_threads - 1)
        ]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(tasks,), name=f"rawpaged-cpu-{i + 1}", daemon=True
            )
            for i, tasks in enumerate(self._tasks)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, kernel: Callable[..., None], count: int, *args: Any, grain: int = 1) -> None:
        """kernel(*args, start, stop) over disjoint ranges that make up [0, count).

        Ranges are at least `grain` long, so that little work is not handed out at all.
        """
        parts = max(1, min(self.num_threads, count // max(grain, 1)))
        bounds = [count * part // parts for part in range(parts + 1)]
        self.run_ranges(kernel, bounds, *args)

    def run_ranges(self, kernel: Callable[..., None], bounds: list[int], *args: Any) -> None:
        """kernel(*args, bounds[i], bounds[i + 1]) for each i, at most one a thread."""
        helpers = len(bounds) - 2
        for i in range(helpers):
            self._tasks[i].put((kernel, (*args, bounds[i + 1], bounds[i + 2])))
        try:
            kernel(*args, bounds[0], bounds[1])
        finally:
            failures = [self._done.get() for _ in range(helpers)]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the helpers. The team must not be used afterwards."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(
        self, tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None]
    ) -> None:
        while (task := tasks.get()) is not None:
            kernel, args = task
            try:
                kernel(*args)
            except BaseException as failure:  # handed to the thread that called run
                self._done.put(failure)
            else:
                self._done.put(None)
