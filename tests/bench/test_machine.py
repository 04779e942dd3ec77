"""Where a row was measured and what else ran there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import machine
from bench.handover import _seconds_of_op, measure_handover
from bench.machine import (
    CpuTimes,
    LoadMeter,
    busy_share,
    git_commit,
    last_level_cache_bytes,
    process_tree_seconds,
)
from bench.quiet import BusyMachineError, check_quiet, least_busy


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_commit_is_dirty_only_by_tracked_files_outside_the_results(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == ""
    git(tmp_path, "init", "-q")
    rows = tmp_path / "bench" / "results" / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("{}\n")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Begin")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    rows.write_text("{}\n{}\n")
    (tmp_path / "untracked").write_text("")
    assert git_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("x = 2\n")
    assert git_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_processor_time_of_descendants_counts() -> None:
    # The child waits after its work, so that its time is not yet its parent's.
    script = "e=__import__('time')\nwhile e.process_time()<0.3: pass\nprint(flush=True);input()"
    before = process_tree_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = process_tree_seconds(os.getpid()) - before
        child.communicate(b"\n")
    assert used >= 0.25
    assert process_tree_seconds(child.pid) == 0


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = iter([2.0, 2.3])
    monkeypatch.setattr(machine, "process_tree_seconds", lambda pid: next(own, 2.9))
    monkeypatch.setattr(machine, "cpu_times", lambda: CpuTimes(busy=100.0, total=1000.0))
    before = time.monotonic()
    meter = LoadMeter()
    inner = time.monotonic()
    time.sleep(0.02)
    monkeypatch.setattr(machine, "cpu_times", lambda: CpuTimes(busy=100.8, total=1001.0))
    least = time.monotonic() - inner
    cores = meter.other_cores()
    most = time.monotonic() - before
    assert cores is not None
    # In all half a second more than this process used.
    assert 0.5 / most <= cores * 1.000001
    assert cores <= 0.500001 / least
    # Clocks of the kernel disagree by a tick or so; nobody works less than nothing.
    assert meter.other_cores() == 0.0
    monkeypatch.setattr(machine, "cpu_times", lambda: None)
    assert meter.other_cores() is None


def test_busy_share_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([CpuTimes(10.0, 100.0), CpuTimes(10.5, 102.0)])
    monkeypatch.setattr(machine, "cpu_times", lambda: next(times))
    assert busy_share(0.0) == pytest.approx(0.25)
    monkeypatch.setattr(machine, "cpu_times", lambda: None)
    assert busy_share(0.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_processor_times_of_this_machine() -> None:
    times = machine.cpu_times()
    assert times is not None
    assert 0 < times.busy < times.total


def test_cache_size_comes_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    assert last_level_cache_bytes() == machine.DEFAULT_CACHE_BYTES
    for index, size in enumerate(("32K\n", "1M\n", "512\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert last_level_cache_bytes() == 2**20


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([0.3, 0.01, 0.5], 0.01), ([0.3, 0.2, 0.4, 0.25], 0.2), ([None], None), ([0.08], 0.08)],
)
def test_a_server_may_still_have_something_to_do(
    shares: list[float | None], expected: float | None
) -> None:
    assert least_busy(iter(shares).__next__) == expected


def test_quiet_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_quiet(0.05, require=True) == 0.05
    assert check_quiet(None, require=True) is None
    assert capsys.readouterr().err == ""
    assert check_quiet(0.5, require=False) == 0.5
    assert "50% busy" in capsys.readouterr().err
    with pytest.raises(BusyMachineError, match="50% busy"):
        check_quiet(0.5, require=True)


def test_what_an_op_of_two_threads_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond half of what it takes one; nothing can be told of a single processor."""
    monkeypatch.setattr("bench.handover.usable_cores", lambda: 1)
    assert measure_handover() is None
    monkeypatch.setattr("bench.handover.usable_cores", lambda: 2)
    seconds = iter([10e-6, 6e-6])
    monkeypatch.setattr("bench.handover._seconds_of_op", lambda num_threads: next(seconds))
    assert measure_handover() == pytest.approx(1000)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_ops_that_pause_take_time(num_threads: int) -> None:
    assert 1e-7 < _seconds_of_op(num_threads) < 1
