"""PagedAttention serving for large language models without a deep-learning framework.

`import rawpaged` is cheap: numba and the engine are imported when `LLM` or `AsyncEngine` is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rawpaged.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from rawpaged.engine.async_engine import AsyncEngine
    from rawpaged.engine.llm import LLM
    from rawpaged.scheduler.kv_stats import KVStats

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncEngine", "KVStats", "RequestOutputKind", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "rawpaged.engine.llm",
    "AsyncEngine": "rawpaged.engine.async_engine",
    "KVStats": "rawpaged.scheduler.kv_stats",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
