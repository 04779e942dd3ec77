"""Results as JSON lines, one for each system, block size and number of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from bench.capacity.experiments import BLOCK_SIZE, Settings, Workload
from bench.capacity.sharing import Sharing
from bench.capacity.simulator import Outcome
from bench.capacity.tables import Results
from bench.rows import Origin, append_row, make_row

Case = tuple[str, Mapping[str, object], Mapping[str, object]]
"""Name, parameters, results."""


def write_rows(path: Path, origin: Origin, results: Results) -> None:
    """Appends everything that was found."""
    settings = results.settings
    for workload in settings.workloads:
        for name, parameters, found in _cases(results, workload):
            row = make_row(
                origin,
                benchmark="capacity",
                case=f"{workload.name}: {name}",
                parameters={**_common(settings, workload), **parameters},
                results=found,
                load_before=None,
                other_cores=None,
            )
            append_row(path, row)


def _common(settings: Settings, workload: Workload) -> dict[str, object]:
    step_model, count = settings.step_model, len(workload.sizes)
    return {
        "requests": count,
        "mean_prompt_len": sum(size.prompt_len for size in workload.sizes) / count,
        "mean_output_len": sum(size.output_len for size in workload.sizes) / count,
        "seed": settings.seed,
        "model": step_model.shape.name,
        "machine": step_model.machine.name,
        "kv_bytes": step_model.machine.kv_bytes,
        "max_model_len": step_model.shape.max_model_len,
        "efficiency": step_model.efficiency,
        "seconds_per_sequence": step_model.seconds_per_sequence,
    }


def _cases(results: Results, workload: Workload) -> Iterator[Case]:
    name, settings = workload.name, results.settings
    for system, result in results.systems[name].items():
        yield (
            f"system {system}",
            {
                "system": system,
                "latency_bound": settings.latency_bound,
                "offered_rate": workload.offered_rate,
            },
            {
                "full": asdict(result.full),
                "offered": asdict(result.offered) if result.offered else None,
                "rate_at_bound": result.rate_at_bound,
                "latency_by_rate": result.curve,
            },
        )
    for kind, by_size in (("recompute", results.block_sizes), ("swap", results.swapped)):
        for block_size, outcome in by_size[name].items():
            yield _preemption(kind, block_size, outcome)
    for kind, by_case in (("samples", results.samples), ("beams", results.beams)):
        for (width, prefix_len), sharing in by_case[name].items():
            yield _sharing(kind, width, prefix_len, sharing, results.num_blocks)


def _preemption(kind: str, block_size: int, outcome: Outcome) -> Case:
    parameters = {"system": "paged", "block_size": block_size, "preemption_mode": kind}
    return f"block size {block_size}, {kind}", parameters, asdict(outcome)


def _sharing(kind: str, width: int, prefix_len: int, sharing: Sharing, num_blocks: int) -> Case:
    with_sharing, without_sharing = sharing.batched(num_blocks)
    return (
        f"{width} {kind}, prefix {prefix_len}",
        {"kind": kind, "sequences": width, "prefix_len": prefix_len, "block_size": BLOCK_SIZE},
        {
            "saving": sharing.saving(num_blocks),
            "requests_at_once": with_sharing,
            "requests_at_once_without_sharing": without_sharing,
            "copies_per_token": sharing.copies_per_token,
        },
    )
