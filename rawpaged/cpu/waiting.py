"""How threads in compiled code wait for a word of memory to change: spin, yield, then sleep.

Spinning answers in well under a microsecond, but takes a core from whoever could use it; asleep, a
thread costs nothing and takes some 20 us to come back. On Linux sleepers wait on a futex; elsewhere
they look every 50 us.
"""

from __future__ import annotations

import platform
import sys

from numba import njit, types

from rawpaged.cpu.atomics import add_word, load_word, pause

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "arm64": 98}
_FUTEX = _FUTEX_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
"""Number of the system call; 0: there is none, or it is not known."""
_LITTLE = sys.byteorder == "little"
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to this process
_EVERYBODY = 2**31 - 1
_NAP_MICROSECONDS = 50

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())

SPINS = 1500
"""Looks before a thread gives way: some 30 us."""
YIELDS = 20
"""Times it lets others run before it sleeps."""


@njit(nogil=True)
def has_changed(word, seen, looks):
    """Whether the word stopped being `seen` within so many looks."""
    for _ in range(looks):
        if load_word(word) != seen:
            return True
        pause()
    return False


@njit(nogil=True)
def wait_while(word, seen, sleepers):
    """Return once the word is not `seen`, or sometimes before; `sleepers` counts who sleeps.

    Whoever changes the word calls `wake` afterwards.
    """
    if has_changed(word, seen, SPINS):
        return
    for _ in range(YIELDS):
        _sched_yield()
        if load_word(word) != seen:
            return
    add_word(sleepers, 1)
    # The system compares the lower half again before it lets the thread sleep, so a change
    # between this look and that one is not missed.
    if load_word(word) == seen:
        if _FUTEX and _LITTLE:
            _syscall(_FUTEX, word, _FUTEX_WAIT, seen & 0xFFFFFFFF, 0, 0, 0)
        else:
            _usleep(_NAP_MICROSECONDS)
    add_word(sleepers, -1)


@njit(nogil=True)
def wake(word, sleepers):
    """Wake who sleeps until the word changes."""
    if _FUTEX and _LITTLE and load_word(sleepers) > 0:
        _syscall(_FUTEX, word, _FUTEX_WAKE, _EVERYBODY, 0, 0, 0)
