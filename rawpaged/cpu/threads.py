"""A team of threads that share the work of ops, one op at a time or a recorded list of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from rawpaged.cpu import work_sharing
from rawpaged.cpu.arguments import address_of, encode, owner_of
from rawpaged.cpu.compiling import Kernel, compile_entry
from rawpaged.cpu.work_sharing import COMMAND_WORDS, TEAM_WORDS
from rawpaged.errors import ConfigError

MAX_THREADS = 256
_FIRST_COMMANDS = 512
"""Commands of a run for which there is room from the beginning."""

_MOST_ARGUMENT_WORDS = 256

Count = int | npt.NDArray[np.int64]
"""A number, or an array i64[1] that holds it."""
Words = npt.NDArray[np.int64]


def usable_processors() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Calls:
    """Calls as they are written down: a kernel, its arguments, and a range to run it over."""

    def __init__(self) -> None:
        self.commands: list[tuple[int, int, int, int, int]] = []
        """Entry, index of the first word of its arguments, count, where to find it, grain."""
        self.words: list[int] = []
        self._owners: dict[int, Any] = {}

    def add(self, kernel: Kernel, count: Count, args: tuple[Any, ...], grain: int) -> None:
        kinds, words = encode(args)
        fixed, place = (count, 0) if isinstance(count, int) else (0, address_of(count))
        command = (kernel.entry(kinds), len(self.words), fixed, place, max(grain, 1))
        self.commands.append(command)
        self.words += words
        for argument in (*args, count):
            owner = owner_of(argument)
            self._owners[id(owner)] = owner

    def finish(self) -> Recording:
        return Recording(self.commands, self.words, self._owners)


class Recording:
    """Calls that can be repeated; keeps the memory that they use."""

    def __init__(
        self,
        commands: list[tuple[int, int, int, int, int]],
        words: list[int],
        owners: dict[int, Any],
    ) -> None:
        self._owners = owners
        self._words = np.array(words, np.int64)
        self.template = np.zeros((len(commands), COMMAND_WORDS), np.int64)
        if commands:
            entries, firsts, counts, places, grains = np.array(commands, np.int64).T
            self.template[:, work_sharing.ENTRY] = entries
            self.template[:, work_sharing.ARGUMENTS] = address_of(self._words) + 8 * firsts
            self.template[:, work_sharing.COUNT] = counts
            self.template[:, work_sharing.COUNT_ADDRESS] = places
            self.template[:, work_sharing.GRAIN] = grains


class _SingleCall:
    """One call after the other in the same words."""

    def __init__(self) -> None:
        self._words = np.zeros(_MOST_ARGUMENT_WORDS, np.int64)
        self.template = np.zeros((1, COMMAND_WORDS), np.int64)
        self.template[0, work_sharing.ARGUMENTS] = address_of(self._words)
        self.address = address_of(self.template)

    def write(self, kernel: Kernel, count: int, args: tuple[Any, ...], grain: int) -> None:
        kinds, words = encode(args)
        self._words[: len(words)] = words
        row = self.template[0]
        row[work_sharing.ENTRY] = kernel.entry(kinds)
        row[work_sharing.COUNT] = count
        row[work_sharing.GRAIN] = max(grain, 1)


class ThreadTeam:
    """`run` splits an index range over the caller and `num_threads - 1` helpers.

    Numba's own thread pools abort the process when two Python threads use them at once and live
    as long as the process; this one belongs to an engine and ends with it. Kernels run without
    the GIL, and between the calls of a recording there is no Python. Helpers look for work for
    some 30 us after the last, then sleep. One thread at a time may call `run`, `record`, `replay`.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or usable_processors()
        if self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads={num_threads} is more than {MAX_THREADS}")
        self._state = _aligned_words(TEAM_WORDS)
        self._state_address = address_of(self._state)
        self._state[work_sharing.NUM_THREADS] = self.num_threads
        self._commands: list[Words] = []
        self._make_room(_FIRST_COMMANDS)
        self._calls: _Calls | None = None
        self._single = _SingleCall()
        self._lead, serve, self._dismiss = _entries()
        self._helpers = [
            threading.Thread(
                target=serve, args=(self._state_address,), name=f"rawpaged-cpu-{i}", daemon=True
            )
            for i in range(1, self.num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, kernel: Kernel, count: Count, *args: Any, grain: int = 1) -> None:
        """kernel(*args, start, stop) over disjoint ranges that make up [0, count).

        Ranges are at least `grain` long, but for the last. While `record` runs, the call is only
        written down; a count in memory is then read at each replay.
        """
        if self._calls is not None:
            self._calls.add(kernel, count, args, grain)
            return
        number = int(count) if isinstance(count, int) else int(count[0])
        if number == 0:
            return
        self._single.write(kernel, number, args, grain)
        self._lead(self._state_address, self._single.address, 1)

    def record(self, forward: Callable[[], None]) -> Recording:
        """The calls of `run` that `forward` makes, none of which is done."""
        assert self._calls is None, "recordings do not nest"
        calls = self._calls = _Calls()
        try:
            forward()
        finally:
            self._calls = None
        return calls.finish()

    def replay(self, recording: Recording) -> None:
        """Do what was recorded, over what the arrays hold now."""
        assert self._calls is None, "a replay cannot be recorded"
        template = recording.template
        if len(template) > len(self._commands[-1]):
            self._make_room(len(template))
        self._lead(self._state_address, address_of(template), len(template))

    def close(self) -> None:
        """End the helpers. The team must not be used afterwards."""
        self._dismiss(self._state_address)
        for helper in self._helpers:
            helper.join()

    def _make_room(self, num_commands: int) -> None:
        # A helper that slept through the end of a run may still look at the old words.
        commands = _aligned_words(num_commands, COMMAND_WORDS)
        self._commands.append(commands)
        self._state[work_sharing.COMMANDS] = address_of(commands)


def _entries() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """lead, serve and dismiss for Python; they release the GIL."""
    word = types.int64

    def compiled(function: Any, num_words: int) -> Callable[..., None]:
        name = f"{function.__module__}.{function.__name__}"
        entry: Callable[..., None] = compile_entry(
            function.py_func, ((word,) * num_words, types.void), name, ""
        ).ctypes
        return entry

    return (
        compiled(work_sharing.lead, 3),
        compiled(work_sharing.serve, 1),
        compiled(work_sharing.dismiss, 1),
    )


def _aligned_words(*shape: int) -> Words:
    """Zeros that begin with a cache line."""
    size = int(np.prod(shape))
    words = np.zeros(size + 8, np.int64)
    first = -address_of(words) % 64 // 8
    return words[first : first + size].reshape(shape)
