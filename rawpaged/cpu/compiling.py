"""`kernel`: how every CPU kernel is compiled, and where the machine code is kept.

Numba's cache notices a change of the file that defines a kernel, but not of a file it takes
functions from. So the folder's name holds a digest of all sources of this package.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.core.config

from rawpaged.cache_dir import cache_dir

logger = logging.getLogger(__name__)


def _kernel_cache_dir() -> str:
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return str(cache_dir() / "kernels" / digest.hexdigest())


_CACHE_DIR = os.environ.get("NUMBA_CACHE_DIR") or _kernel_cache_dir()


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile on first call without the GIL, and keep the machine code for the next process.

    No fast-math: sums keep the order they are written in and products are not fused, so that
    vectorised and scalar parts of a loop give equal bits. Division by zero gives inf or NaN, as
    a check in the loop would keep it from vectorising.
    """
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    # The cache's place is read from the global setting at this moment only; a program that
    # uses numba for itself keeps its own.
    config: Any = numba.core.config
    before = config.CACHE_DIR
    config.CACHE_DIR = _CACHE_DIR
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        logger.warning("kernels will be compiled at every start: %s", error)
    finally:
        config.CACHE_DIR = before
    compiled: Callable[..., None] = dispatcher
    return compiled
