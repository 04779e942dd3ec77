"""The experiments of docs/capacity.md, each a function from settings to plain results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.capacity.allocators import (
    Allocator,
    ContiguousSlabs,
    DemandMappedMemory,
    OrcaReservation,
    PagedBlocks,
)
from bench.capacity.arrivals import all_at_once, poisson
from bench.capacity.lengths import Dataset, RequestSize
from bench.capacity.model import StepModel, SwapModel
from bench.capacity.sharing import BeamRecord, Sharing, measure_sharing
from bench.capacity.simulator import Outcome, Simulation

BLOCK_SIZE = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (2, 4, 6)
PREFIX_LENS = (0, 80, 341)
"""None; a prompt with one example and with five (section 6.4 of the paper)."""
SWAPPED_TOKENS = 512
OUTPUT_SPREADS = (0.6, 0.88, 1.0)
_LOADS = (0.3, 0.6, 0.8, 0.9, 0.95, 1.0, 1.05)
"""Offered rates over the rate at which requests end when they queue."""
_MOST_LOAD = 3.0
"""With few requests even this may not fill the queue."""

MakeAllocator = Callable[[], Allocator]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of requests, in order of arrival, and the rate at which batches are counted."""

    name: str
    sizes: Sequence[RequestSize]
    followed: Sequence[RequestSize]
    """Fewer of them, whose sharing is followed token by token."""
    offered_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What all experiments share."""

    workloads: Sequence[Workload]
    step_model: StepModel = field(default_factory=StepModel)
    latency_bound: float = 0.2
    """Seconds from arrival to end for each token generated, on average."""
    seed: int = 0

    def simulate(
        self,
        make: MakeAllocator,
        workload: Workload,
        rate: float | None = None,
        swap_model: SwapModel | None = None,
    ) -> Outcome:
        """At `rate` requests a second; None: all come at once, so that memory is the limit."""
        sizes = workload.sizes
        arrivals = all_at_once(sizes) if rate is None else poisson(sizes, rate, self.seed)
        simulation = Simulation(
            make(), arrivals, self.step_model, warm_up=len(sizes) // 10, swap_model=swap_model
        )
        return simulation.run()


def systems(step_model: StepModel) -> dict[str, MakeAllocator]:
    """The systems compared, by name."""
    shape, slots = step_model.shape, step_model.num_kv_slots

    def orca(policy: str) -> MakeAllocator:
        return lambda: OrcaReservation(slots, shape.max_model_len, policy)

    def mapped(page_kib: int) -> MakeAllocator:
        kv_bytes = step_model.machine.kv_bytes
        return lambda: DemandMappedMemory(
            kv_bytes, page_kib * 1024, shape.num_layers, shape.layer_kv_bytes
        )

    return {
        "FasterTransformer": lambda: ContiguousSlabs(slots, shape.max_model_len),
        "Orca (Max)": orca("max"),
        "Orca (Pow2)": orca("pow2"),
        "Orca (Oracle)": orca("oracle"),
        "paged": paged(step_model, BLOCK_SIZE),
        "vAttention 64 KB": mapped(64),
        "vAttention 128 KB": mapped(128),
        "vAttention 2 MB": mapped(2048),
    }


def paged(step_model: StepModel, block_size: int) -> MakeAllocator:
    """rawpaged with blocks of that many tokens."""
    return lambda: PagedBlocks(step_model.num_kv_slots, block_size)


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One system on one workload."""

    full: Outcome
    """With a queue that is never empty."""
    offered: Outcome | None
    """At the workload's offered rate, if it has one."""
    curve: Sequence[tuple[float, float]]
    """(requests a second, normalised latency), rates rising."""
    rate_at_bound: float | None
    """Requests a second at which normalised latency reaches the bound; None: never."""


def run_system(settings: Settings, workload: Workload, make: MakeAllocator) -> SystemResult:
    """Memory shares, batches and the latency curve of one system.

    Raises ValueError if there are too few requests to fill the memory.
    """
    full = settings.simulate(make, workload)
    if not full.requests_per_s:
        raise ValueError(
            f"{workload.name}: the memory holds most of the {len(workload.sizes)} requests at "
            "once, so it never fills; give more --requests, a longer trace or less --kv-gib"
        )
    offered = None
    if workload.offered_rate is not None:
        offered = settings.simulate(make, workload, workload.offered_rate)
    curve: list[tuple[float, float]] = []
    loads = list(_LOADS)
    while loads:
        load = loads.pop(0)
        rate = load * full.requests_per_s
        latency = settings.simulate(make, workload, rate).normalised_latency
        curve.append((rate, latency))
        # A queue takes time to grow: a short run may stay below the bound beyond the rate at
        # which a full memory works.
        if not loads and latency <= settings.latency_bound and load < _MOST_LOAD:
            loads.append(1.1 * load)
    return SystemResult(full, offered, curve, crossing(curve, settings.latency_bound))


def crossing(curve: Sequence[tuple[float, float]], bound: float) -> float | None:
    """Where a rising curve reaches `bound`, on straight lines between points.

    0 if its first point is above already, None if all are below.
    """
    if curve[0][1] > bound:
        return 0.0
    for (low, low_value), (high, high_value) in itertools.pairwise(curve):
        if high_value > bound:
            return low + (bound - low_value) / (high_value - low_value) * (high - low)
    return None


def run_block_sizes(settings: Settings, workload: Workload) -> dict[int, Outcome]:
    """A full memory with blocks of each size."""
    return {
        block_size: settings.simulate(paged(settings.step_model, block_size), workload)
        for block_size in BLOCK_SIZES
    }


def run_sharing(workload: Workload, beams: BeamRecord | None) -> dict[tuple[int, int], Sharing]:
    """By number of sequences and length of the shared prefix; beams if there is a record.

    One sequence stands for basic sampling, which shares nothing but a prefix.
    """
    widths = WIDTHS if beams else (1, *WIDTHS)
    return {
        (width, prefix_len): measure_sharing(
            workload.followed, width, BLOCK_SIZE, prefix_len=prefix_len, beams=beams
        )
        for width in widths
        for prefix_len in PREFIX_LENS
    }


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Seconds that giving way costs one request of SWAPPED_TOKENS tokens, with one block size."""

    swap_out: float
    swap_in: float
    batched_swap: float
    """Out and in, with one batched copy each way."""
    recompute_alone: float
    recompute_beside: float
    """What computing it anew adds to a step of 32 requests with a full memory."""


def preemption_cost(step_model: StepModel, block_size: int) -> PreemptionCost:
    """Of one request, by formula."""
    swap = SwapModel(block_size, step_model.shape, step_model.machine)
    one_way = swap.seconds(SWAPPED_TOKENS)
    context = step_model.num_kv_slots - SWAPPED_TOKENS
    prompts = [SWAPPED_TOKENS]
    beside = step_model.step_seconds(31, context, prompts) - step_model.step_seconds(31, context)
    return PreemptionCost(
        swap_out=one_way,
        swap_in=one_way,
        batched_swap=2 * replace(swap, copies_per_block=0).seconds(SWAPPED_TOKENS),
        recompute_alone=step_model.step_seconds(0, 0, prompts),
        recompute_beside=beside,
    )


def run_swapping(settings: Settings, workload: Workload) -> dict[int, Outcome]:
    """As `run_block_sizes`, but requests that give way are swapped instead of recomputed."""
    return {
        block_size: settings.simulate(
            paged(settings.step_model, block_size),
            workload,
            swap_model=SwapModel(
                block_size, settings.step_model.shape, settings.step_model.machine
            ),
        )
        for block_size in BLOCK_SIZES
    }


def run_sensitivity(
    settings: Settings, dataset: Dataset, count: int
) -> dict[str, dict[str, Outcome]]:
    """A full memory under other assumptions, by their names and by system.

    The assumptions are the spread of outputs, and how fast steps are.
    """
    cases = {}
    for cv in OUTPUT_SPREADS:
        outputs = replace(dataset.output, cv=cv)
        sizes = replace(dataset, output=outputs).draw(count, settings.seed)
        cases[f"outputs with cv {cv}"] = (settings, Workload(dataset.name, sizes, ()))
    ideal = replace(settings.step_model, efficiency=1.0, seconds_per_sequence=0.0)
    sizes = dataset.draw(count, settings.seed)
    cases["steps as fast as the data sheet"] = (
        replace(settings, step_model=ideal),
        Workload(dataset.name, sizes, ()),
    )
    return {
        name: {
            system: case.simulate(make, workload)
            for system, make in systems(case.step_model).items()
            if system in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged")
        }
        for name, (case, workload) in cases.items()
    }
