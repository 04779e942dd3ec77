"""Where this package keeps what it would be slow to fetch or compile again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$RAWPAGED_CACHE, else $XDG_CACHE_HOME/rawpaged, else ~/.cache/rawpaged; it may not exist."""
    if own := os.environ.get("RAWPAGED_CACHE"):
        return Path(own).expanduser()
    # The standard says that a relative XDG_CACHE_HOME is to be ignored.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "rawpaged"
