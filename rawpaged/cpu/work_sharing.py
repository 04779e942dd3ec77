"""How threads share a list of commands without locks, and without waiting for whoever is not there.

A command is a kernel with its arguments and a range [0, count) to run over. Commands are done in
order: the next begins when every part of this one is done. The range is cut into regions, one for
each thread or few of them. A thread takes parts of its own region, large ones first, so that it
goes through memory in order and no other thread gets into its way; then of whatever region has
items left. So a thread which the system has taken off its core holds up nobody unless it has a part
in hand; all others can do the whole list among them.

Each run of a list has a number, and every word that threads compete for carries it. A thread that
comes back from a long sleep in the middle of a run that is over finds other numbers and leaves.
Numbers are unique for 2**31 runs.

A command's words, one cache line, are written by the leader before a run:

    PENDING  run number << 32 | items that are not done
    ENTRY    address of the compiled kernel: void(arguments, start, stop)
    ARGUMENTS, COUNT, GRAIN (fewest items in a part)
    COUNT_ADDRESS  where the leader finds the count when a run begins; 0: it is in COUNT

In a team's memory a line for each region follows:

    CLAIM    run number << 32 | items of the region that nobody has taken: its last ones
    END      of the region

Commands with a count of 0 are left out of the run.

The team's words are three cache lines.
"""

from __future__ import annotations

from numba import njit

from rawpaged.cpu.atomics import add_word, call_entry, load_word, replace_word, store_word
from rawpaged.cpu.waiting import wait_while, wake

COMMAND_WORDS = 8
PENDING, ENTRY, ARGUMENTS, COUNT, GRAIN, COUNT_ADDRESS = range(6)
CLAIM, END = range(2)

MAX_REGIONS = 8
"""More would make the leader write longer than threads lose by sharing one."""

TEAM_WORDS = 24
RUN, NUM_COMMANDS, COMMANDS, NUM_REGIONS, IS_CLOSED = range(5)
IDLE_SLEEPERS = 8
"""Threads asleep until a run begins."""
PART_SLEEPERS = 16
"""Threads asleep until others have done their parts."""

_WORD = 8
_LINE = _WORD * COMMAND_WORDS
_LOW = 0xFFFFFFFF
_LAST_RUN = 2**31 - 1


@njit(nogil=True)
def lead(team, template, num_commands):
    """Run the commands of the template with whoever of the team is awake or wakes up meanwhile."""
    last = load_word(team + _WORD * RUN)
    run = last + 1 if last < _LAST_RUN else 1
    number = run << 32
    num_regions = load_word(team + _WORD * NUM_REGIONS)
    target = load_word(team + _WORD * COMMANDS)
    num_written = 0
    for i in range(num_commands):
        source = template + _LINE * i
        count = load_word(source + _WORD * COUNT)
        count_address = load_word(source + _WORD * COUNT_ADDRESS)
        if count_address != 0:
            count = load_word(count_address)
        if count == 0:
            continue
        grain = load_word(source + _WORD * GRAIN)
        store_word(target + _WORD * ENTRY, load_word(source + _WORD * ENTRY))
        store_word(target + _WORD * ARGUMENTS, load_word(source + _WORD * ARGUMENTS))
        store_word(target + _WORD * GRAIN, grain)
        store_word(target + _WORD * PENDING, number | count)
        _write_regions(target + _LINE, count, grain, number, num_regions)
        target += _LINE * (1 + num_regions)
        num_written += 1
    store_word(team + _WORD * NUM_COMMANDS, num_written)
    _begin(team, last, run)
    _take_part(team, run, 0)


@njit(nogil=True)
def serve(team, index):
    """Take part in every run until the team is closed; index is the thread's, 0 the leader's."""
    seen = 0
    while True:
        run = load_word(team + _WORD * RUN)
        if run == seen:
            wait_while(team + _WORD * RUN, seen, team + _WORD * IDLE_SLEEPERS)
        elif load_word(team + _WORD * IS_CLOSED):
            return
        else:
            seen = run
            _take_part(team, run, index)


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
def _write_regions(lines, count, grain, number, num_regions):
    """Cut [0, count) into regions of at least a grain each; the last ones may be empty."""
    num_used = max(1, min(num_regions, count // grain))
    start = 0
    for region in range(num_regions):
        end = min(count, (count * (region + 1) + num_used - 1) // num_used)
        store_word(lines + _LINE * region + _WORD * END, end)
        store_word(lines + _LINE * region + _WORD * CLAIM, number | (end - start))
        start = end


@njit(nogil=True)
def _take_part(team, run, index):
    """Do parts of a run until all of it is done, or it is found to be over."""
    num_regions = load_word(team + _WORD * NUM_REGIONS)
    sleepers = team + _WORD * PART_SLEEPERS
    command = load_word(team + _WORD * COMMANDS)
    for _ in range(load_word(team + _WORD * NUM_COMMANDS)):
        done = 0
        for step in range(num_regions):
            done += _do_region(command, run, (index + step) % num_regions, num_regions)
        if done > 0 and (add_word(command + _WORD * PENDING, -done) - done) & _LOW == 0:
            wake(command + _WORD * PENDING, sleepers)
        if not _wait_until_done(command + _WORD * PENDING, run, sleepers):
            return
        command += _LINE * (1 + num_regions)


@njit(nogil=True)
def _do_region(command, run, region, num_regions):
    """Take parts of a region and do them until none is left; how many items that was."""
    claim = command + _LINE * (1 + region)
    done = 0
    while True:
        word = load_word(claim)
        left = word & _LOW
        if word >> 32 != run or left == 0:
            return done
        part = left
        if num_regions > 1:
            part = min(left, max(load_word(command + _WORD * GRAIN), left // 2))
        if not replace_word(claim, word, word - part):
            continue
        # From here on the run cannot end before this part is done, and nothing of it changes.
        start = load_word(claim + _WORD * END) - left
        entry = load_word(command + _WORD * ENTRY)
        call_entry(entry, load_word(command + _WORD * ARGUMENTS), start, start + part)
        done += part


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
