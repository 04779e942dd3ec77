"""What the sequences of one request share: samples of a prompt, and beams.

Forks, copies on write and beams that change owners are those of rawpaged's own KVCacheManager.
Nothing is scheduled: each request is followed over its life, alone, and what fits at once follows
from the mean number of blocks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.capacity.lengths import RequestSize
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.kv_cache_manager import KVCacheManager


class SequenceGroup:
    """The sequences of one request, which all hold equally many tokens."""

    def __init__(self, num_blocks: int, block_size: int, prompt_len: int, width: int) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, enable_caching=False)
        prompt, params = (0,) * prompt_len, SamplingParams()
        self.requests = [Request(str(i), prompt, params, max_tokens=1) for i in range(width)]
        first, *others = self.requests
        self.manager.start(first, ())
        self._write(first, prompt_len)
        for request in others:
            blocks, request.num_computed_tokens = self.manager.get_shareable_blocks(
                first, prompt_len
            )
            self.manager.fork(first, request, blocks)

    def append(self) -> None:
        """Every sequence stores a token of its own."""
        for request in self.requests:
            self._write(request, 1)
        self.manager.take_block_copies()  # nobody makes them

    def reorder(self, parents: Sequence[int]) -> None:
        """Sequence i goes on from what sequence parents[i] holds."""
        if list(parents) != list(range(len(parents))):
            self.manager.reorder(self.requests, parents)

    def _write(self, request: Request, num_tokens: int) -> None:
        has_slots = self.manager.allocate_slots(request, num_tokens)
        assert has_slots, "the pool must hold all sequences without sharing"
        request.num_computed_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class Sharing:
    """Blocks of requests, on average over their lives."""

    with_sharing: float
    """Different blocks of a request, without those of a prefix that all requests share."""
    without_sharing: float
    """Entries of its block tables: what its sequences would take one by one."""
    common_prefix: int = 0
    """Blocks of a prefix that all requests share."""
    copies_per_token: float = 0.0
    """Blocks copied on write, for a token generated."""

    def batched(self, num_blocks: int) -> tuple[float, float]:
        """Requests that fit at once into so many blocks, with sharing and without."""
        free = num_blocks - self.common_prefix
        return free / self.with_sharing, num_blocks / self.without_sharing

    def saving(self, num_blocks: int) -> float:
        """Blocks saved by sharing over blocks without it, with the pool full of such requests."""
        with_sharing, without_sharing = self.batched(num_blocks)
        return 1 - without_sharing / with_sharing


def measure_sharing(
    sizes: Sequence[RequestSize],
    width: int,
    block_size: int,
    *,
    prefix_len: int = 0,
    beams: BeamRecord | None = None,
) -> Sharing:
    """Follows requests of `width` sequences; with a record their beams change as recorded.

    `prefix_len` tokens in front of every prompt are the same for all requests; their full blocks
    are held once.
    """
    common = prefix_len // block_size
    refs = used = steps = copies = tokens = 0
    for index, size in enumerate(sizes):
        prompt_len = prefix_len + size.prompt_len
        last = -(-(prompt_len + size.output_len) // block_size)
        group = SequenceGroup(width * last, block_size, prompt_len, width)
        pool = group.manager.block_pool
        parents = beams.parents(width, index) if beams else None
        refs += pool.num_refs
        used += pool.num_used_blocks
        for _ in range(size.output_len - 1):
            if parents is not None:
                group.reorder(next(parents))
            group.append()
            refs += pool.num_refs
            used += pool.num_used_blocks
        steps += size.output_len
        copies += group.manager.num_block_copies
        tokens += width * size.output_len
    return Sharing(used / steps - common, refs / steps, common, copies / tokens)


@dataclass(frozen=True, slots=True)
class BeamRecord:
    """Which beam each beam went on from, step by step, in searches with a real model."""

    model: str
    searches: dict[int, list[list[list[int]]]]
    """By width: for each search and step the parents."""

    def parents(self, width: int, number: int) -> Iterator[list[int]]:
        """Steps without end for the `number`-th request: searches one after another."""
        searches = self.searches[width]
        return itertools.chain.from_iterable(
            itertools.islice(itertools.cycle(searches), number % len(searches), None)
        )

    @property
    def num_steps(self) -> int:
        """Of each width."""
        return min(sum(map(len, searches)) for searches in self.searches.values())


def read_beam_record(path: Path) -> BeamRecord:
    """What `bench.capacity.beams` wrote; raises ValueError for anything else."""
    record = json.loads(path.read_text(encoding="utf-8"))
    searches = {
        int(width): [list(_steps(search.split(), int(width))) for search in found]
        for width, found in record["parents"].items()
    }
    return BeamRecord(record["model"], searches)


def _steps(words: Iterable[str], width: int) -> Iterator[list[int]]:
    for word in words:
        parents = [int(digit) for digit in word]
        if len(parents) != width or max(parents) >= width:
            raise ValueError(f"{word!r} is no step of {width} beams")
        yield parents
