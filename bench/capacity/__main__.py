"""The tables of the PagedAttention paper, measured again: `python -m bench.capacity --out docs`.

A simulation over lengths of requests; no model runs. docs/capacity.md says what is assumed, what
came out, and why it differs from the paper. Needs matplotlib (the extra `bench`) for the plots.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bench.capacity import paper
from bench.capacity.experiments import (
    BLOCK_SIZES,
    Settings,
    Workload,
    preemption_cost,
    run_block_sizes,
    run_sensitivity,
    run_sharing,
    run_swapping,
    run_system,
    systems,
)
from bench.capacity.lengths import ALPACA, SHAREGPT
from bench.capacity.model import A100_40GB, OPT_13B, StepModel
from bench.capacity.rows import write_rows
from bench.capacity.sharing import read_beam_record
from bench.capacity.tables import Results, all_tables, write_tables
from bench.capacity.trace import COLUMNS, read_trace
from bench.rows import Origin, command_line
from rawpaged.errors import ConfigError

BEAM_RECORD = Path(__file__).parent / "data" / "beam_parents.json"
_ALPACA_FACTOR = 5
"""So many more requests than of ShareGPT, for they are that much shorter."""
_MOST_FOLLOWED = 400
"""Requests of a workload whose sharing is followed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all experiments. 0: all went well; 2: the arguments cannot be honoured."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        _check(options)
        settings = _settings(options)
        results = run_all(settings, with_sensitivity=options.trace is None, seen=options.requests)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tables = all_tables(results)
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_tables(options.out / "capacity.md", tables)
        if not options.no_plots:
            from bench.capacity.plots import write_plots

            write_plots(options.out / "images", results)
    if options.output is not None:
        write_rows(options.output, Origin(command_line(given, program="bench.capacity")), results)
    return 0


def run_all(settings: Settings, *, with_sensitivity: bool, seen: int) -> Results:
    """Every experiment on every workload; `seen` requests for the sensitivity of the results."""
    record = read_beam_record(BEAM_RECORD)
    by_workload = {workload.name: workload for workload in settings.workloads}
    found = {}
    for name, workload in by_workload.items():
        print(f"{name}: {len(workload.sizes)} requests ...", file=sys.stderr)
        found[name] = {
            system: run_system(settings, workload, make)
            for system, make in systems(settings.step_model).items()
        }
    return Results(
        settings=settings,
        systems=found,
        samples={n: run_sharing(w, None) for n, w in by_workload.items()},
        beams={n: run_sharing(w, record) for n, w in by_workload.items()},
        block_sizes={n: run_block_sizes(settings, w) for n, w in by_workload.items()},
        swapped={n: run_swapping(settings, w) for n, w in by_workload.items()},
        costs={size: preemption_cost(settings.step_model, size) for size in BLOCK_SIZES},
        sensitivity=run_sensitivity(settings, SHAREGPT, seen) if with_sensitivity else {},
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.capacity", description=__doc__.split("\n", 1)[0]
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder: tables go into its capacity.md, plots into images/")
    add("--output", type=Path, help="file that JSON rows are appended to")
    add("--no-plots", action="store_true", help="only tables; needs no matplotlib")
    add("--trace", type=Path, help="lengths of requests, instead of the synthetic ones")
    add(
        "--trace-columns",
        default=",".join(COLUMNS),
        metavar="PROMPT,OUTPUT",
        help="the trace's names for the two lengths; default: %(default)s",
    )
    add("--requests", type=int, default=1500, help="of each workload; default: %(default)s")
    add("--seed", type=int, default=0)
    add("--latency-bound", type=float, default=0.2, help="seconds a token; default: %(default)s")
    add("--kv-gib", type=float, default=12.0, help="memory for KV; default: %(default)s")
    add("--max-model-len", type=int, default=2048, help="tokens; default: %(default)s")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name, low, high in (
        ("requests", 100, 200_000),
        ("seed", 0, 2**63 - 1),
        ("latency_bound", 0.001, 3600.0),
        ("kv_gib", 0.001, 1e4),  # in blocks of one token, of which each takes memory here
        ("max_model_len", 2, 2**20),
    ):
        value = getattr(options, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be from {low} to {high}")
    if options.trace is None and options.max_model_len < SHAREGPT.longest:
        raise ConfigError(
            f"--max-model-len {options.max_model_len} is less than the {SHAREGPT.longest} tokens "
            "of the longest synthetic request; give a --trace"
        )
    if options.out is not None and not options.no_plots and find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'rawpaged[bench]', or --no-plots")


def _settings(options: argparse.Namespace) -> Settings:
    shape = replace(OPT_13B, max_model_len=options.max_model_len)
    machine = replace(A100_40GB, kv_bytes=int(options.kv_gib * 2**30))
    return Settings(
        workloads=_workloads(options),
        step_model=StepModel(shape, machine),
        latency_bound=options.latency_bound,
        seed=options.seed,
    )


def _workloads(options: argparse.Namespace) -> list[Workload]:
    if options.trace is not None:
        columns = [name.strip() for name in options.trace_columns.split(",")]
        if len(columns) != 2 or not all(columns) or columns[0] == columns[1]:
            raise ConfigError(f"--trace-columns {options.trace_columns!r} are not two names")
        sizes = read_trace(options.trace, columns, longest=options.max_model_len)
        # The name goes into Markdown.
        stem = re.sub(r"[^\w.-]+", "_", options.trace.stem)[:40]
        sizes = sizes[: options.requests]
        return [Workload(f"trace {stem}", sizes, sizes[:_MOST_FOLLOWED])]
    followed = min(options.requests, _MOST_FOLLOWED)
    return [
        Workload(
            dataset.name,
            dataset.draw(count, options.seed),
            dataset.draw(followed, options.seed),
            paper.RATES[dataset.name],
        )
        for dataset, count in (
            (SHAREGPT, options.requests),
            (ALPACA, _ALPACA_FACTOR * options.requests),
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
