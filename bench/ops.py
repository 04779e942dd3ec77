"""`bench ops`: every op of the CPU backend against float64 and against the machine's peaks."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.attention_cases import attention_cases
from bench.handover import measure_handover
from bench.machine import LoadMeter, busy_share, usable_cores
from bench.op_cases import SMOLLM2_135M, OpCase, dense_cases, quantized_cases
from bench.probes import Peaks, measure_peaks
from bench.quiet import check_quiet
from bench.rows import Origin, append_row, format_table, make_row
from bench.sampling_cases import sampling_cases
from bench.timing import Timing, time_calls, time_recorded
from rawpaged.backend import Backend
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.devices import open_backend
from rawpaged.models.config import ModelConfig
from rawpaged.weights.checkpoint import read_model_config

CALLED_FROM_PYTHON = ("sample", "token_logprobs", "edit_logits", "copy_blocks")
"""Ops that are no part of a forward pass, and so of no recording."""
_BLAS_SECONDS = 0.2
"""OpenBLAS's threads, which checks in float64 use, go on looking for work for 2**28 cycles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsOptions:
    """What `bench ops` was asked for."""

    config: str | None
    """config.json, GGUF file or model name; None: the built-in model's shapes."""
    ops: Sequence[str] = ()
    """Names to measure; empty: all."""
    rows: Sequence[int] = (1, 8, 32, 128, 512)
    contexts: Sequence[int] = (128, 1024)
    dtypes: Sequence[str] = ("bfloat16", "float32")
    threads: Sequence[int] = ()
    """Thread counts; empty: all usable cores."""
    seconds: float = 0.25
    seed: int = 0
    require_quiet: bool = False
    output: Path | None = None


def run_ops(options: OpsOptions, origin: Origin) -> int:
    """Check and time each case, append a row for each, print them; returns how many were wrong."""
    model = read_model_config(options.config) if options.config else SMOLLM2_135M
    rows = []
    for num_threads in options.threads or (usable_cores(),):
        load_before = check_quiet(busy_share(), require=options.require_quiet)
        peaks = measure_peaks(num_threads)
        for index, dtype in enumerate(options.dtypes):
            # The type of weights in blocks is their own.
            opened = "bfloat16" if dtype in BLOCK_TYPES else dtype
            backend = open_backend("cpu", dtype=opened, num_threads=num_threads)
            try:
                for case in make_cases(model, options, dtype):
                    # What touches no weights and no KV is the same for every type of them.
                    if index == 0 or case.stored:
                        row = _measure(
                            case, backend, dtype, num_threads, peaks, options, origin, load_before
                        )
                        append_row(options.output, row)
                        rows.append(row)
            finally:
                backend.close()
    print(results_table(rows))
    return sum(row["results"]["refcheck"] != "passed" for row in rows)


def make_cases(model: ModelConfig, options: OpsOptions, dtype: str) -> list[OpCase]:
    """The cases asked for, sorted by op and name; raises ValueError for a name of no op."""
    cases = [case for rows in options.rows for case in _cases_of(model, options, dtype, rows)]
    known = {case.op for case in cases}
    if unknown := set(options.ops) - known:
        raise ValueError(
            f"no case of {', '.join(sorted(unknown))} for weights in {dtype}; there are "
            f"{', '.join(sorted(known))}"
        )
    chosen = [case for case in cases if not options.ops or case.op in options.ops]
    return sorted(chosen, key=lambda case: (case.op, case.name, case.context or 0, case.rows))


def _cases_of(model: ModelConfig, options: OpsOptions, dtype: str, rows: int) -> list[OpCase]:
    if dtype in BLOCK_TYPES:
        return quantized_cases(model, rows, dtype)
    return [
        *dense_cases(model, rows, dtype),
        *attention_cases(model, rows, list(options.contexts), dtype),
        *sampling_cases(model, rows),
    ]


def summarize(case: OpCase, timing: Timing, peaks: Peaks) -> dict[str, Any]:
    """Times in microseconds, rates by the case's formulas at the median, shares of the peaks."""
    bytes_per_s = case.num_bytes / timing.median
    flops_per_s = case.num_flops / timing.median
    return {
        **timing.microseconds(),
        "bytes": case.num_bytes,
        "flops": case.num_flops,
        "gb_per_s": bytes_per_s / 1e9,
        "gflop_per_s": flops_per_s / 1e9,
        "read_peak_share": bytes_per_s / peaks.read_bytes_per_s,
        "product": case.product,
        "flop_peak_share": flops_per_s / peaks.flops_per_s[case.product],
    }


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a case, with the peaks that its shares are of."""
    headers = ["op", "case", "rows", "context", "dtype", "threads", "n", "median us", "min", "p95"]
    headers += ["GB/s", "GFLOP/s", "% read", "% flop"]
    lines = []
    ordered = sorted(rows, key=lambda row: str(row["parameters"]["op"]))
    for row in ordered:
        parameters, results = row["parameters"], row["results"]
        line = [parameters[name] for name in ("op", "name", "rows", "context", "dtype", "threads")]
        if results["refcheck"] == "passed":
            line += [results[name] for name in ("calls", "median_us", "min_us", "p95_us")]
            line += [results["gb_per_s"], results["gflop_per_s"]]
            line += [100 * results["read_peak_share"], 100 * results["flop_peak_share"]]
        else:
            line += ["WRONG", *[None] * 7]
        lines.append(line)
    return format_table(headers, lines)


def _measure(
    case: OpCase,
    backend: Backend,
    dtype: str,
    num_threads: int,
    peaks: Peaks,
    options: OpsOptions,
    origin: Origin,
    load_before: float | None,
) -> dict[str, Any]:
    prepared = case.prepare(backend, np.random.default_rng(options.seed))
    meter = LoadMeter()
    handovers: list[float | None] = []
    results: dict[str, Any] = {"refcheck": "passed"}
    try:
        prepared.check()
    except AssertionError as error:
        results["refcheck"] = str(error).strip()
        print(f"{case.op} {case.name}, {case.rows} rows: {error}", file=sys.stderr)
    else:
        time.sleep(_BLAS_SECONDS)
        handovers.append(measure_handover())
        if case.op in CALLED_FROM_PYTHON:
            timing = time_calls(prepared.calls, options.seconds)
        else:
            timing = time_recorded(backend.capture, prepared.calls, options.seconds)
        handovers.append(measure_handover())
        results |= summarize(case, timing, peaks)
    return make_row(
        origin,
        benchmark="ops",
        case=f"{case.op}/{case.name}",
        parameters={
            "op": case.op,
            "name": case.name,
            "rows": case.rows,
            "context": case.context,
            "dtype": dtype if case.stored else "float32",
            "threads": num_threads,
            "config": options.config or "smollm2-135m",
            "copies": len(prepared.calls),
            "seed": options.seed,
        },
        results=results,
        peaks={
            "read_gb_per_s": peaks.read_bytes_per_s / 1e9,
            **{f"{name}_gflop_per_s": rate / 1e9 for name, rate in peaks.flops_per_s.items()},
        },
        handover_ns=handovers,
        load_before=load_before,
        other_cores=meter.other_cores(),
    )
