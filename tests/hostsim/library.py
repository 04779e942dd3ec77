"""A compiled translation unit as ctypes sees it; the structures mirror launch.h and traffic.h."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.hostsim.traffic import LineTraffic, merge_lines


class Dim(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint32) for axis in "xyz"]

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Region(ctypes.Structure):
    """Bytes that a kernel may access, and may write where `writable`."""

    _fields_ = [
        ("start", ctypes.c_void_p),
        ("origin", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int32),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("regions", ctypes.POINTER(Region)),
        ("num_regions", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_limit", ctypes.c_uint64),
        ("max_accesses", ctypes.c_uint64),
        ("grid", Dim),
        ("block", Dim),
        ("order", ctypes.c_int32),
        ("preempt", ctypes.c_int32),
        ("count_traffic", ctypes.c_int32),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 768),
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int32),
        ("thread_known", ctypes.c_int32),
        ("code_offset", ctypes.c_uint64),
        ("block", Dim),
        ("thread", Dim),
    ]


class _Traffic(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("array", ctypes.c_char_p),
        ("code_offset", ctypes.c_uint64),
        ("line", ctypes.c_int32),
        ("write", ctypes.c_int32),
        ("requests", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("cost", ctypes.c_uint64),
        ("ideal_cost", ctypes.c_uint64),
    ]


class HostSimError(RuntimeError):
    """A kernel did what it may not do. `kind` names the fault; `file` and `line` say where."""

    def __init__(self, kernel: str, kind: str, file: str, line: int, message: str) -> None:
        super().__init__(f"{kernel}: {kind} at {file}:{line}: {message}")
        self.kernel = kernel
        self.kind = kind
        self.file = file
        self.line = line


@cache
def open_library(path: Path) -> Library:
    """The library, opened once: its state, and so its lock, is one for the whole process."""
    return Library(path)


class Library:
    """Kernels of one source; one launch at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._library = ctypes.CDLL(str(path))
        self._launch = self._library.hostsim_launch
        self._launch.argtypes = [ctypes.POINTER(Launch)]
        self._launch.restype = ctypes.POINTER(_Fault)
        self._traffic = self._library.hostsim_traffic
        self._traffic.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
        self._traffic.restype = ctypes.POINTER(_Traffic)

    def entry(self, kernel: str) -> int:
        """The address that goes into `Launch.kernel`."""
        address = ctypes.cast(self._library[f"hostsim_invoke_{kernel}"], ctypes.c_void_p).value
        assert address is not None
        return address

    def launch(self, kernel: str, launch: Launch) -> list[LineTraffic]:
        """Run to the end; what was counted, if the launch asks for it. Raises HostSimError."""
        with self._lock:
            fault = self._launch(ctypes.byref(launch))
            if fault:
                raise self._error(kernel, fault.contents)
            return self._read_traffic() if launch.count_traffic else []

    def _error(self, kernel: str, fault: _Fault) -> HostSimError:
        file, line = Path(fault.file.decode()).name, fault.line
        if not file:
            [(file, line)] = self._lines_of([fault.code_offset])
        where = f"block {fault.block}" + (f" thread {fault.thread}" if fault.thread_known else "")
        message = f"{fault.message.decode()} [{where}]"
        return HostSimError(kernel, fault.kind.decode(), file, line, message)

    def _read_traffic(self) -> list[LineTraffic]:
        count = ctypes.c_uint64()
        rows = self._traffic(ctypes.byref(count))[: count.value]
        lines = self._lines_of([row.code_offset for row in rows])
        return merge_lines(
            LineTraffic(
                file=Path(row.file.decode()).name if row.file else file,
                line=row.line if row.file else line,
                array=row.array.decode() if row.array else "",
                write=bool(row.write),
                requests=row.requests,
                requested_bytes=row.bytes,
                cost=row.cost,
                ideal_cost=row.ideal_cost,
            )
            for row, (file, line) in zip(rows, lines, strict=True)
        )

    def _lines_of(self, code_offsets: Sequence[int]) -> list[tuple[str, int]]:
        """File and line in the kernel's own text of each call that returns to an offset.

        What is inlined counts for where it was written, unless that is one of CUDA's names.
        """
        addresses = [hex(max(offset - 1, 0)) for offset in code_offsets]
        command = ["addr2line", "-a", "-i", "-e", str(self._path), *addresses]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        frames: list[list[tuple[str, int]]] = []
        for text in done.stdout.splitlines():
            if text.startswith("0x"):
                frames.append([])
                continue
            file, _, line = text.split(" (")[0].rpartition(":")
            frames[-1].append((Path(file).name, int(line) if line.isdecimal() else 0))
        return [next(filter(_is_kernel_text, inlined), inlined[0]) for inlined in frames]


def _is_kernel_text(frame: tuple[str, int]) -> bool:
    return frame[0].endswith((".cu", ".cuh")) and frame[0] != "gpu.cuh"
