"""The command that takes pictures of the live page."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.server.chromium import find_chromium
from tests.server.conftest import Server
from tests.server.picture import main


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium or Chrome on this machine")
def test_a_picture_is_taken(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    main([server.url, str(path), "--seconds", "0", "--width", "640", "--height", "480"])
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (640, 480)


def test_without_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:9", "page.png"])
