"""A team of threads that share the work of ops, one op at a time or a recorded list of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import types

from rawpaged.cpu import work_sharing
from rawpaged.cpu.arguments import address_of, encode, owner_of, places_of_num_rows
from rawpaged.cpu.compiling import Kernel, compile_entry
from rawpaged.cpu.work_sharing import COMMAND_WORDS, MAX_REGIONS, TEAM_WORDS
from rawpaged.errors import ConfigError

MAX_THREADS = 256
_FIRST_COMMANDS = 512
"""Commands of a run for which there is room from the beginning."""

_MOST_ARGUMENT_WORDS = 256

Words = npt.NDArray[np.int64]


class PerRow(NamedTuple):
    """A count of `items` for each block of so many rows, the last of which may be shorter."""

    num_rows: int
    block: int = 1
    items: int = 1

    @property
    def number(self) -> int:
        return self.items * -(-self.num_rows // self.block)


Count = int | PerRow | npt.NDArray[np.int64]
"""A number, one that follows from a number of rows, or an array i64[1] that holds it."""


def usable_processors() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Calls:
    """Calls as they are written down: a kernel, its arguments, and a range to run it over."""

    def __init__(self, num_rows: int | None) -> None:
        """With num_rows, all calls must be over so many rows, and can be repeated over fewer."""
        self._num_rows = num_rows
        self.commands: list[tuple[int, int, int, int, int]] = []
        """Entry, index of the first word of its arguments, count, where to find it, grain."""
        self.words: list[int] = []
        self.per_row: list[tuple[int, int]] = []
        """Block and items of each command whose count follows from the rows, else (1, 0)."""
        self.row_words: list[int] = []
        """Which words are numbers of rows."""
        self.owners: dict[int, Any] = {}

    def add(self, kernel: Kernel, count: Count, args: tuple[Any, ...], grain: int) -> None:
        kinds, words = encode(args)
        fixed, place = (0, address_of(count)) if isinstance(count, np.ndarray) else (count, 0)
        if self._num_rows is not None:
            self._note_rows(count, places_of_num_rows(kinds), words)
        number = fixed.number if isinstance(fixed, PerRow) else fixed
        command = (kernel.entry(kinds), len(self.words), number, place, max(grain, 1))
        self.commands.append(command)
        self.words += words
        for argument in (*args, count):
            owner = owner_of(argument)
            self.owners[id(owner)] = owner

    def finish(self) -> Recording:
        return Recording(self)

    def _note_rows(self, count: Count, places: list[int], words: list[int]) -> None:
        """What of a call changes with the number of rows."""
        assert not isinstance(count, int), "a count that does not follow from the rows"
        numbers = [words[place] for place in places]
        if isinstance(count, PerRow):
            numbers.append(count.num_rows)
            self.per_row.append((count.block, count.items))
        else:
            self.per_row.append((1, 0))
        assert set(numbers) <= {self._num_rows}, f"{numbers=} are not {self._num_rows}"
        self.row_words += [len(self.words) + place for place in places]


class Recording:
    """Calls that can be repeated; keeps the memory that they use."""

    def __init__(self, calls: _Calls) -> None:
        self._owners = calls.owners
        self._words = np.array(calls.words, np.int64)
        self.template = np.zeros((len(calls.commands), COMMAND_WORDS), np.int64)
        if calls.commands:
            entries, firsts, counts, places, grains = np.array(calls.commands, np.int64).T
            self.template[:, work_sharing.ENTRY] = entries
            self.template[:, work_sharing.ARGUMENTS] = address_of(self._words) + 8 * firsts
            self.template[:, work_sharing.COUNT] = counts
            self.template[:, work_sharing.COUNT_ADDRESS] = places
            self.template[:, work_sharing.GRAIN] = grains
        self.address = address_of(self.template)
        self._row_words = np.array(calls.row_words, np.int64)
        self._per_row = np.array(calls.per_row, np.int64).reshape(-1, 2)

    def set_num_rows(self, num_rows: int) -> None:
        """Repeat the calls over the first `num_rows` rows from now on; for `record(num_rows=)`."""
        self._words[self._row_words] = num_rows
        block, items = self._per_row.T
        self.template[:, work_sharing.COUNT] = items * -(-num_rows // block)


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
        self._num_regions = min(self.num_threads, MAX_REGIONS)
        self._state[work_sharing.NUM_REGIONS] = self._num_regions
        self._commands: list[Words] = []
        self._make_room(_FIRST_COMMANDS)
        self._calls: _Calls | None = None
        self._single = _SingleCall()
        self._lead, serve, self._dismiss = _entries()
        self._helpers = [
            threading.Thread(
                target=serve,
                args=(self._state_address, i),
                name=f"rawpaged-cpu-{i}",
                daemon=True,
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
        if isinstance(count, PerRow):
            number = count.number
        else:
            number = count if isinstance(count, int) else int(count[0])
        if number == 0:
            return
        self._single.write(kernel, number, args, grain)
        self._lead(self._state_address, self._single.address, 1)

    def record(self, forward: Callable[[], None], *, num_rows: int | None = None) -> Recording:
        """The calls of `run` that `forward` makes, none of which is done.

        With num_rows the recording can be told to repeat them over fewer rows. Then every count is
        PerRow of so many or in memory, and every argument RowsOf has so many rows.
        """
        assert self._calls is None, "recordings do not nest"
        calls = self._calls = _Calls(num_rows)
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
        self._lead(self._state_address, recording.address, len(template))

    def close(self) -> None:
        """End the helpers. The team must not be used afterwards."""
        self._dismiss(self._state_address)
        for helper in self._helpers:
            helper.join()

    def _make_room(self, num_commands: int) -> None:
        # A helper that slept through the end of a run may still look at the old words.
        commands = _aligned_words(num_commands, (1 + self._num_regions) * COMMAND_WORDS)
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
        compiled(work_sharing.serve, 2),
        compiled(work_sharing.dismiss, 1),
    )


def _aligned_words(*shape: int) -> Words:
    """Zeros that begin with a cache line."""
    size = int(np.prod(shape))
    words = np.zeros(size + 8, np.int64)
    first = -address_of(words) % 64 // 8
    return words[first : first + size].reshape(shape)
