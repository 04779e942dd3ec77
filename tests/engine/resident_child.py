"""What a server that is ready holds in memory besides weights and KV pool.

    python -m tests.engine.resident_child FLAG=VALUE ...

The flags are fields of EngineConfig. Prints bytes, a line each: "rss", "weights", "kv_pool" (as
much of it as is in memory) and "rest". A start that compiles keeps some of what LLVM took.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import rawpaged.server.app
import rawpaged.server.run  # noqa: F401  # as a server has them
from rawpaged import AsyncEngine
from rawpaged.config import EngineConfig
from rawpaged.cpu.arguments import address_of
from tests.tiny import engine_of

_PAGE = 4096
_PRESENT = np.uint64(1 << 63)


def resident_bytes(array: npt.NDArray[Any]) -> int:
    """Of the pages that hold the array."""
    first = address_of(array) // _PAGE
    count = -(-(address_of(array) + array.nbytes) // _PAGE) - first
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * count), np.uint64)
    assert len(pages) == count
    return _PAGE * int(np.count_nonzero(pages & _PRESENT))


def _settled_bytes(pools: list[npt.NDArray[Any]]) -> int:
    """Of the pools, once no more of their pages are taken ahead."""
    before = -1
    while (now := sum(resident_bytes(pool) for pool in pools)) != before:
        before = now
        time.sleep(0.5)
    return now


def main(*flags: str) -> None:
    given: dict[str, Any] = dict(flag.split("=") for flag in flags)
    with AsyncEngine(EngineConfig(**given)) as engine:
        runner = engine_of(engine).runner
        pools = [pool for cache in runner.kv_caches for pool in (cache.keys, cache.values)]
        kv_pool = _settled_bytes(pools)
        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        rss, weights = 1024 * int(found[1]), runner.model.weights.nbytes
    print(f"rss {rss}\nweights {weights}\nkv_pool {kv_pool}\nrest {rss - weights - kv_pool}")


if __name__ == "__main__":
    main(*sys.argv[1:])
