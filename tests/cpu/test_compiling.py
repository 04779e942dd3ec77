"""Kernels are compiled once for each set of argument kinds, and once for all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.cpu import compiling
from rawpaged.cpu.compiling import Kernel
from rawpaged.cpu.threads import ThreadTeam


def _double(x: Any, start: int, stop: int) -> None:
    for i in range(start, stop):
        x[i] *= 2


def run(kernel: Kernel, x: npt.NDArray[Any]) -> None:
    team = ThreadTeam(1)
    team.run(kernel, len(x), x)
    team.close()


def test_an_entry_for_each_set_of_kinds() -> None:
    kernel = Kernel(_double)
    for x in (np.ones(8), np.ones(3), np.ones(8, np.float32), np.ones(8)[::2]):
        run(kernel, x)
        assert (x == 2).all()
    assert kernel.num_entries == 3


def test_machine_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "_CACHE_DIR", str(tmp_path))
    hits = []
    for first in (True, False):
        compiling._say_what_takes_long.cache_clear()
        caplog.clear()
        kernel = Kernel(_double)
        run(kernel, np.ones(2))
        run(kernel, np.ones(2, np.float32))
        hits.append([entry.cache_hits for entry in kernel._entries.values()])
        # Said once, and only if something takes long.
        assert ["compiling" in record.message for record in caplog.records] == [True] * first
    assert hits == [[0, 0], [1, 1]]
    # An index and machine code for each of the kinds.
    assert len(list(tmp_path.rglob("*_double*.nbi"))) == 2
    assert len(list(tmp_path.rglob("*_double*.nbc"))) == 2


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiling, "_CACHE_DIR", str(tmp_path / "file"))
    x = np.ones(2)
    run(Kernel(_double), x)
    assert (x == 2).all()


def test_the_key_changes_with_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder of Numba's own choice, where nothing else tells versions apart."""
    monkeypatch.setattr(compiling, "_CACHE_DIR", str(tmp_path))
    for sources, hits in (("a", 0), ("b", 0), ("a", 1)):
        monkeypatch.setattr(compiling, "_SOURCES", sources)
        kernel = Kernel(_double)
        run(kernel, np.ones(2))
        assert [entry.cache_hits for entry in kernel._entries.values()] == [hits]
