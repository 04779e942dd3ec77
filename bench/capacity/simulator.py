"""A discrete simulation of a server: requests come, get memory, run step by step, and end.

Admission is first come, first served, and nobody overtakes. After every step requests may end and
others start (iteration-level scheduling; Yu et al., Orca, OSDI 22), except under a static
allocator. A prompt is computed whole in the step that admits it, beside the decoding of others.
When memory that grows on demand runs out, the request admitted last gives way.

Steps between two events are alike, so they are taken in one leap; sums and times are those of the
single steps.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.capacity.accounts import Accounts, MemoryShares, leap_seconds
from bench.capacity.allocators import Allocator, Grant
from bench.capacity.arrivals import Arrival
from bench.capacity.model import StepModel, SwapModel

MAX_NUM_SEQS = 256
"""Most requests in a step; vLLM's default of the time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation counted.

    Shares, the mean batch and the rate are over the time that steps take, from when `warm_up`
    requests have ended until the last one is admitted; the other numbers are over the whole run.
    """

    shares: MemoryShares
    mean_batch: float
    requests_per_s: float
    normalised_latency: float
    """Mean over requests of seconds from arrival to end, over tokens generated."""
    num_preemptions: int
    num_recomputed_tokens: int
    num_steps: int
    seconds: float


@dataclass(slots=True)
class _Running:
    """A request that has memory."""

    key: int
    arrival: Arrival
    since: int
    """The step that admitted it."""
    tokens: int
    """Tokens of KV that it holds in that step; one more in each step after it."""
    grant: Grant
    final: int
    """Tokens of KV that it holds in its last step."""

    @property
    def due(self) -> int:
        """The first step that it does not enter as it is: it has ended, or needs room."""
        return self.since + min(self.final, int(self.grant.slots)) - self.tokens + 1

    def tokens_in(self, step: int) -> int:
        return self.tokens + step - self.since


class Simulation:
    """One run of requests over one allocator; for a single use.

    With a swap model, requests that give way are copied to the host and back; without, they are
    computed anew. Raises ValueError for a request that the memory could never hold.
    """

    def __init__(
        self,
        allocator: Allocator,
        arrivals: Sequence[Arrival],
        step_model: StepModel,
        *,
        warm_up: int = 0,
        swap_model: SwapModel | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
    ) -> None:
        for arrival in arrivals:
            if not allocator.fits(arrival.size):
                raise ValueError(
                    f"a request of {arrival.size.prompt_len} + {arrival.size.output_len} tokens "
                    f"never fits the memory of {allocator.capacity:.0f} slots"
                )
        self._allocator = allocator
        self._arrivals = arrivals
        self._step_model = step_model
        self._swap_model = swap_model
        self._warm_up = warm_up
        self._max_num_seqs = max_num_seqs
        self._accounts = Accounts(allocator.capacity)
        self._waiting: deque[tuple[int, int]] = deque()
        """Key, and the tokens it will hold in the step that admits it."""
        self._running: dict[int, _Running] = {}
        """In order of admission."""
        self._stopped: list[_Running] = []
        """Of a static batch; they keep their memory until all have stopped."""
        self._due: list[tuple[int, int, int]] = []
        """Heap of (due, since, key); entries of requests that gave way stay behind."""
        self._num_arrived = 0
        self._num_started = 0
        self._step = 0
        self._now = 0.0
        self._swap_seconds = 0.0
        self._num_preemptions = 0
        self._num_recomputed = 0
        self._latencies: list[float] = []
        self._num_ended = 0
        """While shares are counted."""

    @property
    def _is_booked(self) -> bool:
        return self._num_started < len(self._arrivals)

    def run(self) -> Outcome:
        """Simulates until every request has ended."""
        arrivals = self._arrivals
        while True:
            while self._num_arrived < len(arrivals) and self._next_arrival() <= self._now:
                key = self._num_arrived
                self._waiting.append((key, arrivals[key].size.prompt_len))
                self._num_arrived += 1
            has_room = self._settle()
            prompts = self._admit() if has_room else []
            if self._running:
                self._advance(prompts)
            elif self._num_arrived == len(arrivals):
                assert not self._waiting, "an empty memory must admit any request"
                return self._outcome()
            elif not self._waiting:
                self._now = self._next_arrival()

    def _next_arrival(self) -> float:
        return self._arrivals[self._num_arrived].seconds

    def _settle(self) -> bool:
        """Ends requests and makes room for the others' next tokens; False if one gave way."""
        hungry = []
        while self._due and self._due[0][0] <= self._step:
            _, since, key = heapq.heappop(self._due)
            request = self._running.get(key)
            if request is None or request.since != since:
                continue
            if request.tokens_in(self._step) > request.final:
                self._end(request)
            else:
                hungry.append(request)
        if self._stopped and not self._running:
            for request in self._stopped:
                self._release(request)
            self._stopped.clear()
        # Those that have been here longest are the last to give way.
        has_room = True
        for request in sorted(hungry, key=lambda request: (request.since, request.key)):
            if request.key in self._running:
                has_room &= self._grow(request)
        self._accounts.tokens += self._accounts.num_live
        return has_room

    def _end(self, request: _Running) -> None:
        del self._running[request.key]
        self._accounts.stop(request.final, request.grant, request.final)
        if self._allocator.is_static:
            self._stopped.append(request)
        else:
            self._release(request)

    def _release(self, request: _Running) -> None:
        self._allocator.free(request.key)
        self._accounts.take_back(request.grant)
        elapsed = self._now - request.arrival.seconds
        self._latencies.append(elapsed / request.arrival.size.output_len)
        self._num_ended += self._is_booked
        if len(self._latencies) == self._warm_up:
            self._accounts.forget()
            self._num_ended = 0

    def _grow(self, request: _Running) -> bool:
        """Room for the next token, from the requests admitted last; False if one gave way."""
        has_room = True
        while True:
            grant = self._allocator.grow(request.key, request.tokens_in(self._step))
            if grant is not None:
                break
            has_room = False
            victim = self._running[next(reversed(self._running))]
            self._preempt(victim)
            if victim is request:
                return False
        self._accounts.replace(request.final, request.grant, grant)
        request.grant = grant
        heapq.heappush(self._due, (request.due, request.since, request.key))
        return has_room

    def _preempt(self, request: _Running) -> None:
        del self._running[request.key]
        stored = request.tokens_in(self._step) - 1
        self._accounts.stop(request.final, request.grant, stored)
        self._accounts.take_back(request.grant)
        self._allocator.free(request.key)
        self._waiting.appendleft((request.key, stored + 1))
        self._num_preemptions += 1
        if self._swap_model:
            self._swap_seconds += self._swap_model.seconds(stored)
        else:
            self._num_recomputed += stored

    def _admit(self) -> list[int]:
        """Starts those that fit; returns how many tokens of each have to be computed at once."""
        prompts: list[int] = []
        if self._allocator.is_static and (self._running or self._stopped):
            return prompts
        while self._waiting and len(self._running) < self._max_num_seqs:
            key, tokens = self._waiting[0]
            arrival = self._arrivals[key]
            grant = self._allocator.admit(key, arrival.size, tokens)
            if grant is None:
                break
            self._waiting.popleft()
            request = _Running(key, arrival, self._step, tokens, grant, arrival.size.num_kv_tokens)
            self._running[key] = request
            heapq.heappush(self._due, (request.due, request.since, key))
            self._accounts.add(request.final, grant, tokens)
            self._num_started = max(self._num_started, key + 1)
            if self._swap_model and tokens > arrival.size.prompt_len:
                self._swap_seconds += self._swap_model.seconds(tokens - 1)
            else:
                prompts.append(tokens)
        return prompts

    def _advance(self, prompts: Sequence[int]) -> None:
        """Runs the step, and those after it that are like it."""
        accounts = self._accounts
        num_decodes = accounts.num_live - len(prompts)
        context = accounts.tokens - sum(prompts)
        first = self._step_model.step_seconds(num_decodes, context, prompts) + self._swap_seconds
        more = num_decodes * self._step_model.seconds_per_context_token
        num_steps = 1
        if not (prompts or self._swap_seconds):
            num_steps = self._due[0][0] - self._step
            if not self._waiting and self._num_arrived < len(self._arrivals):
                gap = self._next_arrival() - self._now
                num_steps = min(num_steps, _steps_until(gap, first, more))
        if self._is_booked:
            accounts.book(num_steps, first, more, is_waited_for=bool(self._waiting))
        self._now += leap_seconds(num_steps, first, more)
        accounts.tokens += (num_steps - 1) * accounts.num_live
        self._step += num_steps
        self._swap_seconds = 0.0

    def _outcome(self) -> Outcome:
        accounts = self._accounts
        return Outcome(
            shares=accounts.shares(),
            mean_batch=accounts.mean_live(),
            requests_per_s=self._num_ended / accounts.seconds if accounts.seconds else 0.0,
            normalised_latency=math.fsum(self._latencies) / max(len(self._latencies), 1),
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed,
            num_steps=self._step,
            seconds=self._now,
        )


def _steps_until(gap: float, first: float, more: float) -> int:
    """The least number of steps of `first`, `first + more`, ... seconds that take `gap` or more."""
    half = more / 2
    root = math.sqrt((first - half) ** 2 + 4 * half * gap)
    num_steps = max(1, math.floor(2 * gap / (first - half + root)))
    while leap_seconds(num_steps, first, more) < gap:
        num_steps += 1
    return num_steps
