"""Ranges are done once each and in order, whoever takes part; idle helpers sleep."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import types

from rawpaged.cpu import work_sharing
from rawpaged.cpu.arguments import RowsOf, address_of
from rawpaged.cpu.atomics import load_word, pause
from rawpaged.cpu.compiling import compile_entry, kernel
from rawpaged.cpu.floats import row_of
from rawpaged.cpu.threads import MAX_THREADS, PerRow, ThreadTeam
from rawpaged.errors import ConfigError
from tests.tiny import wait_until


@kernel
def _count(visits, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        visits[i] += 1


@kernel
def _sizes(sizes, start, stop):  # type: ignore[no-untyped-def]
    sizes[start] = stop - start


@kernel
def _wait_for_others(visits, address, start, stop):  # type: ignore[no-untyped-def]
    """visits[i] = 1; visits[0] only once all others are, within seconds."""
    if start == 0:
        for _ in range(100_000_000):
            done = 1
            for other in range(1, 4):
                done &= load_word(address + 8 * other)  # type: ignore[call-arg]
            if done:
                visits[0] = 1
                break
            pause()  # type: ignore[call-arg]
        start = 1
    for i in range(start, stop):
        visits[i] = 1


@kernel
def _sum_before(totals, index, size, start, stop):  # type: ignore[no-untyped-def]
    """Each of totals[index][:size] = 1 + the sum of the line before."""
    before = totals[index - 1].sum()
    for i in range(start, stop):
        totals[index, i] = before % 1000 + 1


@kernel
def _store_all(out, integer, single, double, x, rows, start, stop):  # type: ignore[no-untyped-def]
    out[0] = integer
    out[1] = single
    out[2] = double
    out[3] = x[1, 2]
    out[4] = row_of(rows, 1)[3]
    out[5] = rows.columns
    out[6] = rows.num_rows


def repeat(team: ThreadTeam, times: int, visits: npt.NDArray[np.int64]) -> None:
    for _ in range(times):
        team.run(_count, len(visits), visits)


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    opened = ThreadTeam(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("grain", [0, 1, 7, 1000])
def test_every_index_once(team: ThreadTeam, grain: int) -> None:
    for count in (0, 1, 2, 3, 50, 999):
        visits = np.zeros(count + 1, np.int64)
        team.run(_count, count, visits, grain=grain)
        assert visits.tolist() == [1] * count + [0]


def test_parts_are_as_long_as_the_grain() -> None:
    team = ThreadTeam(3)
    sizes = np.zeros(100, np.int64)
    team.run(_sizes, 100, sizes, grain=9)
    team.close()
    parts = sizes[sizes > 0]
    assert parts.sum() == 100
    assert sorted(parts.tolist())[3] >= 9  # but for the last of each of three regions
    # The first region has 34 items, and half of them are its first part.
    assert parts[0] == 17
    assert sizes[34] == 16


def test_who_has_done_its_region_helps_with_others() -> None:
    """Item 0 ends when the others are done, also the one that comes after it in its region."""
    team = ThreadTeam(2)
    visits = np.zeros(4, np.int64)
    team.run(_wait_for_others, 4, visits, address_of(visits))
    team.close()
    assert visits.tolist() == [1, 1, 1, 1]


def test_calls_of_a_recording_are_done_in_order(team: ThreadTeam) -> None:
    """Each call reads all that the one before wrote, for calls of many sizes."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([1, 2, 3, 40, 700], 900)
    totals = np.zeros((len(sizes) + 1, 700), np.int64)

    def forward() -> None:
        for index, size in enumerate(sizes.tolist()):
            team.run(_sum_before, size, totals, index + 1, size)

    recording = team.record(forward)
    assert not totals.any()
    expected = [0]
    for size in sizes.tolist():
        expected.append(size * (expected[-1] % 1000 + 1))
    for _ in range(20):
        totals[:] = 0
        team.replay(recording)
        assert totals.sum(axis=1).tolist() == expected


def test_runs_follow_each_other_without_a_pause(team: ThreadTeam) -> None:
    """Helpers that are late for one run meet the next ones."""
    visits = np.zeros(64, np.int64)
    recording = team.record(partial(repeat, team, 3, visits))
    for _ in range(2000):
        team.replay(recording)
        team.run(_count, 64, visits)
    assert (visits == 8000).all()


def test_kinds_of_arguments() -> None:
    team = ThreadTeam(1)
    out = np.zeros(7)
    x = np.arange(24, dtype=np.int32).reshape(4, 6)
    matrix = np.arange(60, dtype=np.float32).reshape(3, 5, 4)
    for view, expected in ((x, x[1, 2]), (x[::2, ::-1], x[2, 3])):
        args = (2**40, np.float32(0.1), -2.5, view, RowsOf(matrix[:, 1:3]))
        team.run(_store_all, 1, out, *args)
        np.testing.assert_array_equal(
            out, [2**40, np.float32(0.1), -2.5, expected, matrix[1, 1, 3], 8, 3]
        )
    with pytest.raises(AssertionError, match="not contiguous"):
        team.run(_store_all, 1, out, 1, np.float32(0), 0.0, x, RowsOf(matrix[:, :, ::2]))
    team.close()


def test_a_recording_keeps_its_memory_and_no_longer() -> None:
    team = ThreadTeam(2)
    visits = np.zeros(50, np.int64)
    gone = weakref.ref(visits)
    recording = team.record(partial(team.run, _count, 10, visits[:10]))
    del visits
    gc.collect()
    team.replay(recording)
    kept = gone()
    assert kept is not None
    assert kept.tolist() == [1] * 10 + [0] * 40
    del recording, kept
    gc.collect()
    assert gone() is None
    team.close()


@kernel
def _mark(out, x, start, stop):  # type: ignore[no-untyped-def]
    """out[i] += 1 for items of 4 rows, out[-1] = rows."""
    for i in range(start, stop):
        out[i] += 1
        out[-1] = x.num_rows


def test_a_recording_over_fewer_rows(team: ThreadTeam) -> None:
    x = np.zeros((22, 3), np.float32)
    by_row, by_block, fixed = (np.zeros(40, np.int64) for _ in range(3))
    number = np.array([2])

    def forward() -> None:
        team.run(_mark, PerRow(len(x)), by_row, RowsOf(x))
        team.run(_mark, PerRow(len(x), 4, 5), by_block, RowsOf(x))
        team.run(_mark, number, fixed, RowsOf(x))

    recording = team.record(forward, num_rows=22)
    for num_rows, count in ((22, 0), (1, 7), (8, 3), (9, 1)):
        for out in (by_row, by_block, fixed):
            out[:] = 0
        number[0] = count
        recording.set_num_rows(num_rows)
        team.replay(recording)
        blocks = 5 * -(-num_rows // 4)
        for out, items in ((by_row, num_rows), (by_block, blocks), (fixed, count)):
            assert out.tolist()[:-1] == [1] * items + [0] * (39 - items)
            assert out[-1] == (num_rows if items else 0)


def test_what_a_recording_of_rows_cannot_repeat(team: ThreadTeam) -> None:
    x, out = np.zeros((22, 3), np.float32), np.zeros(40, np.int64)
    for count, rows in ((22, x), (PerRow(21), x), (PerRow(22), x[1:])):
        with pytest.raises(AssertionError, match=r"rows|are not 22"):
            team.record(partial(team.run, _mark, count, out, RowsOf(rows)), num_rows=22)


def test_a_recording_that_fails_leaves_the_team_as_it_was(team: ThreadTeam) -> None:
    visits = np.zeros(5, np.int64)

    def forward() -> None:
        team.run(_count, 5, visits)
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"):
        team.record(forward)
    assert not visits.any()
    team.run(_count, 5, visits)
    assert (visits == 1).all()


def test_idle_helpers_sleep_and_wake(team: ThreadTeam) -> None:
    sleepers = team._state[work_sharing.IDLE_SLEEPERS :]
    visits = np.zeros(100, np.int64)
    for _ in range(3):
        wait_until(lambda: int(sleepers[0]) == team.num_threads - 1)
        team.run(_count, 100, visits)
    assert (visits == 3).all()


def test_run_numbers_begin_again(team: ThreadTeam) -> None:
    visits = np.zeros(100, np.int64)
    team.run(_count, 100, visits)
    team._state[work_sharing.RUN] = 2**31 - 2
    for _ in range(4):
        team.run(_count, 100, visits)
    assert (visits == 5).all()
    assert team._state[work_sharing.RUN] == 3


def test_a_helper_that_comes_back_after_its_run_does_nothing() -> None:
    team = ThreadTeam(1)
    signature = ((types.int64,) * 3, types.void)
    take_part: Any = compile_entry(
        work_sharing._take_part.py_func, signature, "tests.take_part", ""
    ).ctypes
    visits = np.zeros(100, np.int64)
    for _ in range(3):
        team.run(_count, 100, visits)
    # As a run is while others are at it: some items taken, more not done.
    command = team._commands[-1][0]
    places = [work_sharing.COMMAND_WORDS + work_sharing.CLAIM, work_sharing.PENDING]
    words = [7 << 32 | 60, 7 << 32 | 90]
    command[places] = words
    for run in (6, 8):
        take_part(address_of(team._state), run, 0)
    assert command[places].tolist() == words
    assert (visits == 3).all()
    team.close()


def test_room_for_commands_grows(team: ThreadTeam) -> None:
    visits = np.zeros(3, np.int64)
    for count in (10, 2000, 10):
        team.replay(team.record(partial(repeat, team, count, visits)))
    assert (visits == 2020).all()


def test_threads_end_with_the_team() -> None:
    before = threading.active_count()
    team = ThreadTeam(4)
    assert threading.active_count() == before + 3
    team.close()
    assert threading.active_count() == before


def test_too_many_threads() -> None:
    with pytest.raises(ConfigError, match=f"num_threads=9999 is more than {MAX_THREADS}"):
        ThreadTeam(9999)
