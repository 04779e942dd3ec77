"""A counter that one thread raises and another waits for, by spinning a moment, then asleep.

Between two ops of a step a few microseconds pass, less than it takes to wake a thread; between two
steps, or when the machine is shared, waiting costs nothing.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

SPINS = 2000
"""Looks at the counter before going to sleep: some 40 us."""

_I64 = ir.IntType(64)


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, as another thread may be writing it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.intp), generate


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Let the processor's other thread run, where there is an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if builder.module.triple.startswith("x86_64"):
            function_type = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            known = builder.module.globals.get(name)
            builder.call(known or ir.Function(builder.module, function_type, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True)
def _spin(counter, seen, spins):
    """Whether the counter left `seen` within so many looks."""
    for _ in range(spins):
        if _load(counter.ctypes.data) != seen:
            return True
        _pause()
    return False


class Signal:
    """Raised by one thread, awaited by one other."""

    def __init__(self) -> None:
        self._counter = np.zeros(1, np.int64)
        self._seen = 0
        self._condition = threading.Condition()
        self._asleep = False

    def raise_(self) -> None:
        """Let the next `wait` return."""
        self._counter[0] += 1
        # The GIL orders this with the waiter: it sees the new count, or we see it asleep.
        if self._asleep:
            with self._condition:
                self._condition.notify()

    def wait(self) -> None:
        """Return once for each `raise_`."""
        if not _spin(self._counter, self._seen, SPINS):
            with self._condition:
                self._asleep = True
                while self._counter[0] == self._seen:
                    self._condition.wait()
                self._asleep = False
        self._seen += 1
