"""How threads share a list of commands without locks, and without waiting for whoever is not there.

A command is a kernel with its arguments and a range [0, count) to run over. Commands are done in
order: the next begins when every part of this one is done. Threads take parts of the range as they
come, large ones first, so that a thread which the system has taken off its core holds up nobody
unless it has a part in hand; all others can do the whole list among them.

Each run of a list has a number, and every word that threads compete for carries it. A thread that
comes back from a long sleep in the middle of a run that is over finds other numbers and leaves.
Numbers are unique for 2**31 runs.

A command's words, one cache line, are written by the leader before a run:

    CLAIM    run number << 32 | items that nobody has taken
    PENDING  run number << 32 | items that are not done
    ENTRY    address of the compiled kernel: void(arguments, start, stop)
    ARGUMENTS, COUNT, GRAIN (fewest items in a part)
    COUNT_ADDRESS  where the leader finds the count when a run begins; 0: it is in COUNT

Commands with a count of 0 are left out of the run.

The team's words are three cache lines.
"""

from __future__ import annotations

from numba import njit

from rawpaged.cpu.atomics import add_word, call_entry, load_word, replace_word, store_word
from rawpaged.cpu.waiting import wait_while, wake

COMMAND_WORDS = 8
CLAIM, PENDING, ENTRY, ARGUMENTS, GRAIN, COUNT, COUNT_ADDRESS = range(7)

TEAM_WORDS = 24
RUN, NUM_COMMANDS, COMMANDS, NUM_THREADS, IS_CLOSED = range(5)
IDLE_SLEEPERS = 8
"""Threads asleep until a run begins."""
PART_SLEEPERS = 16
"""Threads asleep until others have done their parts."""

_WORD = 8
_LOW = 0xFFFFFFFF
_LAST_RUN = 2**31 - 1


@njit(nogil=True)
def lead(team, template, num_commands):
    """Run the commands of the template with whoever of the team is awake or wakes up meanwhile."""
    last = load_word(team + _WORD * RUN)
    run = last + 1 if last < _LAST_RUN else 1
    number = run << 32
    commands = load_word(team + _WORD * COMMANDS)
    target = commands
    for i in range(num_commands):
        source = template + _WORD * COMMAND_WORDS * i
        count = load_word(source + _WORD * COUNT)
        count_address = load_word(source + _WORD * COUNT_ADDRESS)
        if count_address != 0:
            count = load_word(count_address)
        if count == 0:
            continue
        for field in range(ENTRY, GRAIN + 1):
            store_word(target + _WORD * field, load_word(source + _WORD * field))
        store_word(target + _WORD * COUNT, count)
        store_word(target + _WORD * PENDING, number | count)
        store_word(target + _WORD * CLAIM, number | count)
        target += _WORD * COMMAND_WORDS
    store_word(team + _WORD * NUM_COMMANDS, (target - commands) // (_WORD * COMMAND_WORDS))
    _begin(team, last, run)
    _take_part(team, run)


@njit(nogil=True)
def serve(team):
    """Take part in every run until the team is closed."""
    seen = 0
    while True:
        run = load_word(team + _WORD * RUN)
        if run == seen:
            wait_while(team + _WORD * RUN, seen, team + _WORD * IDLE_SLEEPERS)
        elif load_word(team + _WORD * IS_CLOSED):
            return
        else:
            seen = run
            _take_part(team, run)


@njit(nogil=True)
def dismiss(team):
    """Let every `serve` return. There must be no run."""
    last = load_word(team + _WORD * RUN)
    store_word(team + _WORD * IS_CLOSED, 1)
    _begin(team, last, last + 1)


@njit(nogil=True)
def _begin(team, last, run):
    # An exchange, not a store: the look for sleepers that follows must not be done before it.
    replace_word(team + _WORD * RUN, last, run)
    wake(team + _WORD * RUN, team + _WORD * IDLE_SLEEPERS)


@njit(nogil=True)
def _take_part(team, run):
    """Do parts of a run until all of it is done, or it is found to be over."""
    commands = load_word(team + _WORD * COMMANDS)
    num_threads = load_word(team + _WORD * NUM_THREADS)
    sleepers = team + _WORD * PART_SLEEPERS
    for i in range(load_word(team + _WORD * NUM_COMMANDS)):
        command = commands + _WORD * COMMAND_WORDS * i
        while _do_part(command, run, num_threads, sleepers):
            pass
        if not _wait_until_done(command + _WORD * PENDING, run, sleepers):
            return


@njit(nogil=True)
def _do_part(command, run, num_threads, sleepers):
    """Take a part of a command and do it; False if there is none left, or the run is over."""
    word = load_word(command + _WORD * CLAIM)
    left = word & _LOW
    if word >> 32 != run or left == 0:
        return False
    part = left
    if num_threads > 1:
        part = min(left, max(load_word(command + _WORD * GRAIN), left // (2 * num_threads)))
    if not replace_word(command + _WORD * CLAIM, word, word - part):
        return True
    # From here on the run cannot end before this part is done, and nothing of it changes.
    start = load_word(command + _WORD * COUNT) - left
    entry = load_word(command + _WORD * ENTRY)
    call_entry(entry, load_word(command + _WORD * ARGUMENTS), start, start + part)
    if (add_word(command + _WORD * PENDING, -part) - part) & _LOW == 0:
        wake(command + _WORD * PENDING, sleepers)
    return True


@njit(nogil=True)
def _wait_until_done(pending, run, sleepers):
    """Whether the command was seen done, and not the run over."""
    while True:
        word = load_word(pending)
        if word >> 32 != run:
            return False
        if word & _LOW == 0:
            return True
        wait_while(pending, word, sleepers)
