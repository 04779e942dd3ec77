"""`kernel`: how every CPU kernel is compiled, and where the machine code is kept.

A kernel is compiled, for each set of argument kinds that it meets, to one C function

    void entry(int64 arguments, int64 start, int64 stop)

whose arguments are words in memory (`arguments.py`), so that whoever has the address can call it
without Python.

Numba's cache notices a change of the file that defines a function, but not of a file it takes
functions from. So the key of what is kept, and the name of the folder, hold a digest of all sources
of this package and of the features that kernels are made for.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numba.core.config
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from rawpaged.cache_dir import cache_dir
from rawpaged.cpu.arguments import Kind, make_loader
from rawpaged.cpu.features import FEATURES

logger = logging.getLogger(__name__)

_SIGNATURE = (types.int64,) * 3, types.void


def _digest_of_sources() -> str:
    digest = hashlib.blake2b(f"{numba.__version__} {FEATURES}".encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


_SOURCES = _digest_of_sources()
_CACHE_DIR = os.environ.get("NUMBA_CACHE_DIR") or str(cache_dir() / "kernels" / _SOURCES)


class Kernel:
    """A function over a range [start, stop), its last two parameters, that runs without the GIL.

    No fast-math: sums keep the order they are written in and products are not fused, so that
    vectorised and scalar parts of a loop give equal bits. Division by zero gives inf or NaN, as
    a check in the loop would keep it from vectorising.
    """

    def __init__(self, function: Callable[..., None], *, variant: str = "") -> None:
        """`variant` tells functions apart that are made by the same source."""
        self.__doc__ = function.__doc__
        self._name = f"{function.__module__}.{function.__name__}{variant and '_' + variant}"
        # What is not of this package is not in its digest.
        source = Path(inspect.getfile(function)).read_bytes()
        self._source = hashlib.sha256(source).hexdigest()
        set_variant(function, variant)
        self._function: Any = njit(nogil=True, error_model="numpy")(function)
        self._entries: dict[tuple[Kind, ...], Any] = {}

    @property
    def num_entries(self) -> int:
        """For how many sets of argument kinds it has been compiled or loaded."""
        return len(self._entries)

    def entry(self, kinds: tuple[Kind, ...]) -> int:
        """Address of the C function for arguments of these kinds; compiles it if it is new."""
        compiled = self._entries.get(kinds)
        if compiled is None:
            compiled = self._compile(kinds)
            self._entries[kinds] = compiled
        return int(compiled.address)

    def _compile(self, kinds: tuple[Kind, ...]) -> Any:
        function, load = self._function, make_loader(kinds)

        def entry(address, start, stop):  # type: ignore[no-untyped-def]
            function(*load(address, start, stop))

        return compile_entry(entry, _SIGNATURE, self._name, f"{kinds} {self._source}")


def kernel(function: Callable[..., None]) -> Kernel:
    """Compile when first needed, and keep the machine code for the next process."""
    return Kernel(function)


def set_variant(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """The function, with a name of its own among those that the same source makes.

    Symbols of compiled functions are made of their names, argument types and a number that counts
    functions in a process. Machine code from the caches of two processes must not define one symbol
    twice, for whoever asks for it second would get the first one's code.
    """
    if variant:
        function.__qualname__ = f"{function.__qualname__}_{variant}"
    return function


def compile_entry(function: Callable[..., Any], signature: Any, name: str, variant: str) -> Any:
    """A C function; the machine code is kept under `name` and `variant`."""
    digest = hashlib.blake2b(variant.encode(), digest_size=8).hexdigest()
    function.__qualname__ = name
    set_variant(function, digest)
    compiled: Any = CFunc(function, signature, locals={}, options={"error_model": "numpy"})
    # The cache's place is read from the global setting at this moment only; a program that
    # uses numba for itself keeps its own.
    config: Any = numba.core.config
    before = config.CACHE_DIR
    config.CACHE_DIR = _CACHE_DIR
    try:
        compiled._cache = _EntryCache(function, variant)
    except RuntimeError as error:
        logger.warning("kernels will be compiled at every start: %s", error)
    finally:
        config.CACHE_DIR = before
    compiled.compile()
    return compiled


class _EntryCache(FunctionCache):
    """Numba's, with a key that is the same in every process, though entries are closures."""

    def __init__(self, function: Callable[..., None], variant: str) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._variant = variant

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept code; None, after word of it the first time, if it has to be compiled."""
        found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is None:
            _say_what_takes_long()
        return found

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return _SOURCES, self._variant, sig, codegen.magic_tuple()


@cache
def _say_what_takes_long() -> None:
    logger.warning(
        "compiling CPU kernels, for up to a minute; they are kept for the next time that the same "
        "types of weights and KV cache are used"
    )
