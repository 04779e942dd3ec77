"""Results as Markdown tables, and their places in a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.capacity import paper
from bench.capacity.experiments import (
    BLOCK_SIZE,
    PREFIX_LENS,
    PreemptionCost,
    Settings,
    SystemResult,
    Workload,
)
from bench.capacity.sharing import Sharing
from bench.capacity.simulator import Outcome


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that the experiments found; keys of workloads are their names."""

    settings: Settings
    systems: Mapping[str, Mapping[str, SystemResult]]
    samples: Mapping[str, Mapping[tuple[int, int], Sharing]]
    beams: Mapping[str, Mapping[tuple[int, int], Sharing]]
    block_sizes: Mapping[str, Mapping[int, Outcome]]
    swapped: Mapping[str, Mapping[int, Outcome]]
    costs: Mapping[int, PreemptionCost]
    sensitivity: Mapping[str, Mapping[str, Outcome]]

    @property
    def num_blocks(self) -> int:
        return self.settings.step_model.num_kv_slots // BLOCK_SIZE


def all_tables(results: Results) -> dict[str, str]:
    """Every table by the name of its place."""
    workloads = results.settings.workloads
    tables = {"preemption-cost": _preemption_cost(results.costs)}
    for workload in workloads:
        systems = results.systems[workload.name]
        tables[f"memory-{workload.name}"] = _memory(workload.name, systems)
    tables["batched"] = _batched(workloads, results.systems)
    tables["rates"] = _rates(workloads, results.systems)
    tables["samples"] = _sharing(results, results.samples, paper.SAMPLING_SAVINGS)
    tables["beams"] = _sharing(results, results.beams, paper.BEAM_SAVINGS)
    tables["block-sizes"] = _block_sizes(workloads, results.block_sizes)
    tables["preemption"] = _preemption(workloads, results.block_sizes, results.swapped)
    if results.sensitivity:
        tables["sensitivity"] = _sensitivity(results.sensitivity)
    return tables


def insert_tables(document: str, tables: Mapping[str, str]) -> str:
    """The document with each table between its marks; tables without marks go to the end.

    <!-- table: NAME -->
    <!-- end -->
    """
    for name, table in tables.items():
        first, last = f"<!-- table: {name} -->", "<!-- end -->"
        marked = f"{first}\n{table}\n{last}"
        before, _, rest = document.partition(first + "\n")
        _, found, after = rest.partition(last)
        if found:
            document = before + marked + after
        else:
            document += f"\n## {name}\n\n{marked}\n"
    return document


def write_tables(path: Path, tables: Mapping[str, str]) -> None:
    """Puts the tables into the file, which is made if it is not there."""
    document = path.read_text(encoding="utf-8") if path.exists() else "# Capacity\n"
    path.write_text(insert_tables(document, tables), encoding="utf-8")


def _memory(workload: str, systems: Mapping[str, SystemResult]) -> str:
    kinds = ("token states", "reservation", "internal", "external")
    rows = []
    for name, result in systems.items():
        shares = result.full.shares
        # Figure 2 is of ShareGPT.
        published = [
            table.get(name) if workload == "ShareGPT" else None
            for table in (paper.TOKEN_STATES, paper.RESERVATION, paper.INTERNAL, paper.EXTERNAL)
        ]
        found = (shares.token_states, shares.reservation, shares.internal, shares.external)
        cells = [
            _percent(value) + (f" ({_percent(other)})" if other is not None else "")
            for value, other in zip(found, published, strict=True)
        ]
        rest = (shares.rounding, shares.unusable, shares.of_taken)
        rows.append([name, *cells, *map(_percent, rest)])
    return _table(
        ["%", *kinds, "of it rounding", "of it free", "token states in what is allocated"],
        rows,
    )


def _batched(
    workloads: Sequence[Workload], systems: Mapping[str, Mapping[str, SystemResult]]
) -> str:
    headers, columns = ["requests batched on average"], []
    for workload in workloads:
        results = systems[workload.name]
        headers.append(f"{workload.name}, memory full")
        columns.append([f"{result.full.mean_batch:.1f}" for result in results.values()])
        if workload.offered_rate is not None:
            headers += [f"{workload.name}, {workload.offered_rate:g} a second", "paper"]
            columns.append(
                [f"{r.offered.mean_batch:.1f}" if r.offered else "" for r in results.values()]
            )
            published = paper.BATCHED.get(workload.name, {})
            columns.append([_or_nothing(published.get(name), ".2f") for name in results])
    names = list(next(iter(systems.values())))
    return _table(headers, [list(row) for row in zip(names, *columns, strict=True)])


def _rates(workloads: Sequence[Workload], systems: Mapping[str, Mapping[str, SystemResult]]) -> str:
    headers, columns = ["requests a second at the bound"], []
    for workload in workloads:
        results = systems[workload.name]
        of_paged = results["paged"].rate_at_bound
        rates = [result.rate_at_bound for result in results.values()]
        headers += [workload.name, "paged is higher by"]
        columns.append([_or_nothing(rate, ".2f") for rate in rates])
        columns.append([f"{of_paged / rate:.2f}x" if rate and of_paged else "" for rate in rates])
        if workload.name == "ShareGPT":
            headers.append("paper")
            columns.append([_times(paper.RATE_RATIOS.get(name)) for name in results])
    names = list(next(iter(systems.values())))
    return _table(headers, [list(row) for row in zip(names, *columns, strict=True)])


def _sharing(
    results: Results,
    found: Mapping[str, Mapping[tuple[int, int], Sharing]],
    published: Mapping[str, Mapping[int, float]],
) -> str:
    prefixes = [f"saving, prefix of {length}, %" for length in PREFIX_LENS if length]
    headers = [
        "workload",
        "sequences",
        "saving, %",
        "paper, %",
        "requests at once",
        "without sharing",
        "copies on write, per 1000 tokens",
        *prefixes,
    ]
    rows = []
    for workload, by_case in found.items():
        for width in sorted({width for width, _ in by_case}):
            plain = by_case[width, 0]
            batched = plain.batched(results.num_blocks)
            savings = [by_case[width, length].saving(results.num_blocks) for length in PREFIX_LENS]
            rows.append(
                [
                    workload,
                    str(width),
                    _percent(savings[0]),
                    _percent(published.get(workload, {}).get(width)),
                    f"{batched[0]:.1f}",
                    f"{batched[1]:.1f}",
                    f"{1000 * plain.copies_per_token:.1f}",
                    *map(_percent, savings[1:]),
                ]
            )
    return _table(headers, rows)


def _block_sizes(workloads: Sequence[Workload], found: Mapping[str, Mapping[int, Outcome]]) -> str:
    headers = ["block size"]
    for workload in workloads:
        headers += [f"{workload.name}: token states, %", "batched", "requests a second"]
    rows = []
    for block_size in next(iter(found.values())):
        row = [str(block_size)]
        for workload in workloads:
            outcome = found[workload.name][block_size]
            row += [
                _percent(outcome.shares.token_states),
                f"{outcome.mean_batch:.1f}",
                f"{outcome.requests_per_s:.2f}",
            ]
        rows.append(row)
    return _table(headers, rows)


def _preemption_cost(costs: Mapping[int, PreemptionCost]) -> str:
    headers = [
        "block size",
        "swap out, ms",
        "swap in, ms",
        "out and in",
        "out and in, one batched copy",
        "recompute alone",
        "recompute beside 31 others",
    ]
    rows = []
    for block_size, cost in costs.items():
        values = (
            cost.swap_out,
            cost.swap_in,
            cost.swap_out + cost.swap_in,
            cost.batched_swap,
            cost.recompute_alone,
            cost.recompute_beside,
        )
        rows.append([str(block_size), *(f"{1e3 * value:.1f}" for value in values)])
    return _table(headers, rows)


def _preemption(
    workloads: Sequence[Workload],
    recomputed: Mapping[str, Mapping[int, Outcome]],
    swapped: Mapping[str, Mapping[int, Outcome]],
) -> str:
    headers = ["block size"]
    for workload in workloads:
        headers += [f"{workload.name}: recompute", "swap", "preemptions per 100 requests"]
    rows = []
    for block_size in next(iter(recomputed.values())):
        row = [str(block_size)]
        for workload in workloads:
            outcome = recomputed[workload.name][block_size]
            per_request = 100 * outcome.num_preemptions / len(workload.sizes)
            row += [
                f"{outcome.requests_per_s:.2f}",
                f"{swapped[workload.name][block_size].requests_per_s:.2f}",
                f"{per_request:.0f}",
            ]
        rows.append(row)
    return _table(headers, rows)


def _sensitivity(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    headers, rows = ["token states in %, and requests batched"], []
    for name, outcomes in found.items():
        rates = {system: outcome.requests_per_s for system, outcome in outcomes.items()}
        cells = [
            f"{_percent(outcome.shares.token_states)}, {outcome.mean_batch:.1f}"
            for outcome in outcomes.values()
        ]
        ratios = (rates["paged"] / rates[other] for other in ("Orca (Max)", "Orca (Oracle)"))
        rows.append([name, *cells, *(f"{ratio:.2f}x" for ratio in ratios)])
        headers = [headers[0], *outcomes, "rate, paged over Max", "over Oracle"]
    return _table(headers, rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (headers, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(headers) - 1) + "|", *lines[1:]])


def _percent(share: float | None) -> str:
    return _or_nothing(None if share is None else 100 * share, ".1f")


def _times(ratio: str | None) -> str:
    return f"{ratio}x" if ratio else ""


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
