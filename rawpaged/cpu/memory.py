"""How much memory this process may still take, and giving back what it no longer uses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def memory_info() -> tuple[int, int]:
    """(available, total) bytes: the machine's, or the control group's where that is less."""
    available, total = _machine()
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None and limit < total:
        return max(0, min(available, limit - used)), limit
    return available, total


def trim_heap() -> None:
    """Give pages of freed memory back to the system.

    Large arrays are mappings of their own, which go when they are freed. But as such arrays come
    and go, glibc takes ever larger ones (up to 32 MB) from its heap, which it keeps.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if malloc_trim is not None:
        malloc_trim(0)


def _machine() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, total
    return total // 2, total


def _cgroup_number(name: str) -> int | None:
    path = _CGROUP / name
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
