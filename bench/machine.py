"""What a row says about where it was measured, and whether other work disturbed it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_PACKAGES = ("numpy", "numba", "llvmlite", "aiohttp")

DEFAULT_CACHE_BYTES = 32 * 2**20
"""Taken for the last-level cache where the system does not say."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all processors since the machine started."""

    busy: float
    total: float


def describe_machine() -> dict[str, object]:
    """Processor, memory and versions, as they go into every row."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cache_bytes": last_level_cache_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def git_commit(root: Path = _ROOT) -> str:
    """The checkout's commit, with "-dirty" if tracked files differ from it; "" outside of git.

    Rows in bench/results do not count: the first row appended would mark all that follow.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(
        root,
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":(exclude)bench/results",
    )
    return commit + "-dirty" if commit and changes else commit


def cpu_model() -> str:
    """Marketing name of the processor, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the first processor has."""
    sizes = [_cache_size(path.read_text()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def cpu_times() -> CpuTimes | None:
    """None where the system has no /proc/stat."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    # user nice system idle iowait irq softirq steal; guest time is already part of user time.
    ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return CpuTimes((sum(ticks) - idle) / per_second, sum(ticks) / per_second)


def busy_share(seconds: float = 1.0) -> float | None:
    """Share of all processors' time that is spent on anything during the next `seconds`."""
    before = cpu_times()
    time.sleep(seconds)
    after = cpu_times()
    if before is None or after is None:
        return None
    return (after.busy - before.busy) / max(after.total - before.total, 1e-9)


def process_tree_seconds(pid: int) -> float:
    """Processor seconds that a process and its living descendants have used; 0 if it is gone."""
    # utime, stime and those of children that were waited for
    ticks = sum(int(word) for stat in _process_tree(pid) for word in stat[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def process_tree_rss_bytes(pid: int) -> int:
    """Resident memory of a process and its living descendants; pages they share count twice."""
    pages = sum(int(stat[21]) for stat in _process_tree(pid))
    return pages * os.sysconf("SC_PAGE_SIZE")


def _process_tree(pid: int) -> list[list[str]]:
    """Fields of /proc/PID/stat from the third on, of a process and its living descendants."""
    children: dict[int, list[int]] = {}
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # ended in the meantime
            continue
        # The name in parentheses may itself hold blanks and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        own = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(own)
        stats[own] = fields
    found, open_pids = [], [pid]
    while open_pids:
        current = open_pids.pop()
        if current in stats:
            found.append(stats[current])
        open_pids += children.get(current, [])
    return found


class LoadMeter:
    """How many cores others kept busy since construction.

    Others are all processes but this one and its descendants, a server it started among them.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._own = process_tree_seconds(os.getpid())
        self._all = cpu_times()

    def other_cores(self) -> float | None:
        """Mean number of cores; None where the system does not tell."""
        now = cpu_times()
        if now is None or self._all is None:
            return None
        elapsed = time.monotonic() - self._started
        own = process_tree_seconds(os.getpid()) - self._own
        return max(0.0, now.busy - self._all.busy - own) / max(elapsed, 1e-9)


def _cache_size(text: str) -> int:
    text = text.strip()
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
