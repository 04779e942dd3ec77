"""Where this package keeps what it would be slow to fetch or compile again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$RAWPAGED_CACHE, else rawpaged under $XDG_CACHE_HOME, else ~/.cache/rawpaged."""
    chosen = os.environ.get("RAWPAGED_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rawpaged"
