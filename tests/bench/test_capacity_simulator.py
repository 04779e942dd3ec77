"""The simulation against one that walks every slot of every request in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from bench.capacity.accounts import MemoryShares
from bench.capacity.allocators import (
    Allocator,
    ContiguousSlabs,
    DemandMappedMemory,
    OrcaReservation,
    PagedBlocks,
)
from bench.capacity.arrivals import Arrival, all_at_once, poisson
from bench.capacity.lengths import RequestSize
from bench.capacity.model import A100_40GB, OPT_13B, StepModel, SwapModel
from bench.capacity.simulator import Simulation
from rawpaged.config import SchedulerConfig
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.scheduler import Scheduler

LONGEST = 64
SLOTS = 300
STEPS = StepModel()

ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "slabs": lambda: ContiguousSlabs(SLOTS, LONGEST),
    "max": lambda: OrcaReservation(SLOTS, LONGEST, "max"),
    "pow2": lambda: OrcaReservation(SLOTS, LONGEST, "pow2"),
    "oracle": lambda: OrcaReservation(SLOTS, LONGEST, "oracle"),
    "blocks of 1": lambda: PagedBlocks(SLOTS, 1),
    "blocks of 4": lambda: PagedBlocks(SLOTS, 4),
    "blocks of 7": lambda: PagedBlocks(SLOTS, 7),
    "pages": lambda: DemandMappedMemory(SLOTS * 80, 48, 4, 10),
}


def random_sizes(count: int, seed: int) -> list[RequestSize]:
    rng = random.Random(seed)
    return [RequestSize(rng.randint(1, 24), rng.randint(1, 40)) for _ in range(count)]


@dataclass
class _Held:
    key: int
    size: RequestSize
    tokens: int
    slots: float
    taken: float
    ended: bool = False


class SlowSimulation:
    """One step at a time, everything counted anew in each."""

    def __init__(
        self, allocator: Allocator, arrivals: list[Arrival], swap_model: SwapModel | None
    ) -> None:
        self.allocator, self.arrivals, self.swap_model = allocator, arrivals, swap_model
        self.held: list[_Held] = []
        self.queue: list[tuple[int, int]] = []
        self.now, self.next_arrival, self.most_started = 0.0, 0, 0
        self.areas = dict.fromkeys(MemoryShares.__dataclass_fields__, 0.0)
        self.batch_area = self.booked = 0.0
        self.num_steps = self.num_preemptions = self.num_recomputed = 0
        self.latencies: list[float] = []

    def run(self) -> None:
        while self.held or self.queue or self.next_arrival < len(self.arrivals):
            while (
                self.next_arrival < len(self.arrivals)
                and self.arrivals[self.next_arrival].seconds <= self.now
            ):
                size = self.arrivals[self.next_arrival].size
                self.queue.append((self.next_arrival, size.prompt_len))
                self.next_arrival += 1
            if not self.held and not self.queue:
                self.now = self.arrivals[self.next_arrival].seconds
                continue
            self.step()

    def step(self) -> None:
        swap_seconds = 0.0
        gave_way = False
        for held in [held for held in self.held if not held.ended]:
            if held not in self.held:
                continue
            while held in self.held and held.tokens + 1 > held.slots:
                grant = self.allocator.grow(held.key, held.tokens + 1)
                if grant is not None:
                    held.slots, held.taken = grant.slots, grant.taken
                    break
                gave_way = True
                swap_seconds += self.preempt()
            held.tokens += 1
        prompts = []
        if not gave_way and not (self.allocator.is_static and self.held):
            while self.queue:
                key, tokens = self.queue[0]
                size = self.arrivals[key].size
                grant = self.allocator.admit(key, size, tokens)
                if grant is None:
                    break
                del self.queue[0]
                self.held.append(_Held(key, size, tokens, grant.slots, grant.taken))
                self.most_started = max(self.most_started, key + 1)
                if self.swap_model and tokens > size.prompt_len:
                    swap_seconds += self.swap_model.seconds(tokens - 1)
                else:
                    prompts.append(tokens)
        self.finish_step(prompts, swap_seconds)

    def preempt(self) -> float:
        victim = self.held.pop()
        self.allocator.free(victim.key)
        self.queue.insert(0, (victim.key, victim.tokens + 1))
        self.num_preemptions += 1
        if self.swap_model:
            return self.swap_model.seconds(victim.tokens)
        self.num_recomputed += victim.tokens
        return 0.0

    def finish_step(self, prompts: list[int], swap_seconds: float) -> None:
        live = [held for held in self.held if not held.ended]
        context = sum(held.tokens for held in live) - sum(prompts)
        seconds = STEPS.step_seconds(len(live) - len(prompts), context, prompts) + swap_seconds
        if self.most_started < len(self.arrivals):
            self.book(live, seconds)
        self.now += seconds
        self.num_steps += 1
        for held in live:
            held.ended = held.tokens == held.size.num_kv_tokens
        if self.allocator.is_static and not all(held.ended for held in self.held):
            return
        for held in [held for held in self.held if held.ended]:
            self.held.remove(held)
            self.allocator.free(held.key)
            elapsed = self.now - self.arrivals[held.key].seconds
            self.latencies.append(elapsed / held.size.output_len)

    def book(self, live: list[_Held], seconds: float) -> None:
        for held in self.held:
            final = 0 if held.ended else held.size.num_kv_tokens
            tokens = 0 if held.ended else held.tokens
            kinds = {
                "token_states": tokens,
                "reservation": min(final, held.slots) - tokens,
                "internal": held.slots - min(final, held.slots),
                "rounding": held.taken - held.slots,
            }
            for kind, slots in kinds.items():
                self.areas[kind] += slots * seconds
        free = self.allocator.capacity - sum(held.taken for held in self.held)
        self.areas["unusable" if self.queue else "idle"] += free * seconds
        self.batch_area += len(live) * seconds
        self.booked += seconds


@pytest.mark.parametrize("rate", [None, 2.0, 20.0])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_leaps_equal_single_steps(name: str, rate: float | None) -> None:
    sizes = random_sizes(120, seed=1)
    arrivals = all_at_once(sizes) if rate is None else poisson(sizes, rate, seed=2)
    swap_model = SwapModel(4) if name == "blocks of 4" else None
    slow = SlowSimulation(ALLOCATORS[name](), arrivals, swap_model)
    slow.run()
    outcome = Simulation(ALLOCATORS[name](), arrivals, STEPS, swap_model=swap_model).run()
    assert outcome.num_steps == slow.num_steps
    assert outcome.num_preemptions == slow.num_preemptions
    assert outcome.num_recomputed_tokens == slow.num_recomputed
    assert outcome.seconds == pytest.approx(slow.now)
    assert outcome.mean_batch == pytest.approx(slow.batch_area / slow.booked)
    whole = slow.allocator.capacity * slow.booked
    for kind, area in slow.areas.items():
        assert getattr(outcome.shares, kind) == pytest.approx(area / whole, abs=1e-9), kind
    assert sum(slow.areas.values()) == pytest.approx(whole), "every slot is counted once"
    latency = sum(slow.latencies) / len(slow.latencies)
    assert outcome.normalised_latency == pytest.approx(latency)
    if rate is None and name.startswith("blocks"):
        assert outcome.num_preemptions > 0, "the case must reach preemption"


def test_the_first_requests_are_not_counted() -> None:
    sizes = random_sizes(100, seed=5)
    whole = Simulation(PagedBlocks(SLOTS, 4), all_at_once(sizes), STEPS).run()
    late = Simulation(PagedBlocks(SLOTS, 4), all_at_once(sizes), STEPS, warm_up=50).run()
    assert late.seconds == whole.seconds
    assert late.normalised_latency == whole.normalised_latency
    assert late.shares != whole.shares


def run_scheduler(sizes: list[RequestSize], block_size: int) -> CountingScheduler:
    """The engine's own scheduler over 256 slots; counts its steps."""
    config = SchedulerConfig(
        num_blocks=256 // block_size,
        block_size=block_size,
        max_model_len=LONGEST,
        max_num_seqs=256,
        max_num_batched_tokens=100_000,
        enable_prefix_caching=False,
    )
    scheduler = CountingScheduler(config)
    for key, size in enumerate(sizes):
        prompt, params = [0] * size.prompt_len, SamplingParams()
        request = Request(str(key), prompt, params, max_tokens=size.output_len)
        scheduler.add(request.group)
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        scheduler.num_steps += 1
        scheduler.update(output, {request.request_id: 1 for request in output.scheduled})
    return scheduler


class CountingScheduler(Scheduler):
    num_steps = 0


def test_paged_admits_and_preempts_as_the_engines_own_scheduler() -> None:
    sizes = random_sizes(150, seed=3)
    scheduler = run_scheduler(sizes, 4)
    allocator = PagedBlocks(256, 4)
    allocator.kept_free = 0  # as the scheduler is configured
    outcome = Simulation(allocator, all_at_once(sizes), STEPS).run()
    assert outcome.num_steps == scheduler.num_steps
    assert outcome.num_preemptions == scheduler.num_preemptions > 0


def test_the_engine_with_a_block_for_the_longest_request_is_orca_max() -> None:
    sizes = random_sizes(150, seed=4)
    scheduler = run_scheduler(sizes, LONGEST)
    reserved = OrcaReservation(256, LONGEST, "max")
    outcome = Simulation(reserved, all_at_once(sizes), STEPS).run()
    assert outcome.num_steps == scheduler.num_steps
    assert scheduler.num_preemptions == 0
    allocator = PagedBlocks(256, LONGEST)
    allocator.kept_free = 0
    assert Simulation(allocator, all_at_once(sizes), STEPS).run() == outcome


def test_a_step_worked_out_by_hand() -> None:
    shape = replace(
        OPT_13B, num_parameters=100, num_layers=2, hidden_size=10, kv_width=4, max_model_len=64
    )
    machine = replace(A100_40GB, bytes_per_s=50.0, flops_per_s=1000.0)
    model = StepModel(shape, machine, efficiency=0.5, seconds_per_sequence=0.25)
    # 200 bytes of weights, and 10 tokens of 2 * 2 * 4 * 2 = 32 bytes.
    assert model.step_seconds(3, 10) == pytest.approx((200 / 50 + 320 / 50) / 0.5 + 0.75)
    # 33 rows of 200 FLOPs are more than reading; 30 * 31 / 2 pairs of 80 FLOPs.
    expected = (33 * 200 / 1000 + 320 / 50 + 465 * 80 / 1000) / 0.5 + 4 * 0.25
    assert model.step_seconds(3, 10, [30]) == pytest.approx(expected)
    assert model.seconds_per_context_token == pytest.approx(32 / 50 / 0.5)


def test_swapping_worked_out_by_hand() -> None:
    machine = replace(A100_40GB, host_bytes_per_s=1e9, copy_seconds=1e-3)
    swap = SwapModel(16, OPT_13B, machine)
    # 35 tokens: 3 blocks of 16 * 800 KiB, 80 copies each.
    assert swap.seconds(35) == pytest.approx(3 * 16 * 819200 / 1e9 + 3 * 80e-3)
    batched = replace(swap, copies_per_block=0)
    assert batched.seconds(35) == pytest.approx(3 * 16 * 819200 / 1e9 + 1e-3)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"200 \+ 200 tokens never fits the memory of 300 slots"):
        Simulation(PagedBlocks(SLOTS, 4), all_at_once([RequestSize(200, 200)]), STEPS)


def test_poisson_arrivals() -> None:
    sizes = random_sizes(4000, seed=6)
    slow, fast = poisson(sizes, 2.0, seed=7), poisson(sizes, 4.0, seed=7)
    assert slow[-1].seconds == pytest.approx(2000, rel=0.05)
    assert [a.seconds for a in fast] == pytest.approx([a.seconds / 2 for a in slow])
    assert poisson(sizes, 2.0, seed=8) != slow
