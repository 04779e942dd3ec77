"""`bench serve`: latencies and throughput of any server with the OpenAI completions API."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.handover import measure_handover
from bench.load import RequestRecord, Target, first_model, run_load
from bench.machine import (
    LoadMeter,
    busy_share,
    process_tree_rss_bytes,
    process_tree_seconds,
)
from bench.presets import ServeCase
from bench.prompts import arrival_times, make_prompts
from bench.quiet import check_quiet, least_busy
from bench.rows import Origin, append_row, format_table, make_row
from bench.server_process import RunningServer, started_server
from bench.summary import distribution, median_results

_SUMMED = ("errors", "short_requests")
_SHOWN_ERRORS = 5
_WARM_UP_OUTPUT = 8
_IDLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `bench serve` was asked for."""

    target: Target
    label: str
    cases: Sequence[ServeCase]
    repeat: int = 1
    seed: int | None = None
    """None: a new one each time, so that no server knows the prompts."""
    prompt_format: str = "ids"
    token_ids: tuple[int, int] = (1000, 30000)
    warm_up_requests: int | None = None
    """None: one for each place of the case's concurrency."""
    server_command: str | None = None
    server_timeout: float = 600.0
    require_quiet: bool = False
    output: Path | None = None


def run_serve(options: ServeOptions, origin: Origin) -> int:
    """Measure each case, append a row for each, print them; returns the number of errors."""
    rows = measure_server(options, origin)
    print(results_table(rows))
    return sum(row["results"]["errors"] for row in rows)


def measure_server(options: ServeOptions, origin: Origin) -> list[dict[str, Any]]:
    """A row for each case, appended to the output as it comes.

    Raises ServerFailedError, BusyMachineError and aiohttp's errors.
    """
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    command = options.server_command
    server = (
        started_server(command, options.target.url, options.server_timeout)
        if command
        else nullcontext()
    )
    rows = []
    with server as running:
        if not options.target.model:
            model = asyncio.run(first_model(options.target))
            options = replace(options, target=replace(options.target, model=model))
        for case in options.cases:
            row = _measure(case, options, origin, running)
            append_row(options.output, row)
            rows.append(row)
    return rows


def summarize(records: Sequence[RequestRecord], duration: float, output_len: int) -> dict[str, Any]:
    """Counts, rates and latencies of one repetition.

    Rates and latencies are of the requests that succeeded; tokens are counted by the server.
    """
    good = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.completion_tokens for record in good)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    return {
        "requests": len(records),
        "errors": len(errors),
        "error_messages": errors[:_SHOWN_ERRORS],
        "short_requests": sum(record.completion_tokens != output_len for record in good),
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(cached) if cached else None,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": output_tokens / duration,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration,
        "ttft_ms": distribution([record.ttft for record in good]),
        "itl_ms": distribution([gap for record in good for gap in record.gaps]),
        "tpot_ms": distribution([tpot for record in good if (tpot := record.tpot) is not None]),
        "e2e_ms": distribution([record.latency for record in good]),
    }


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a case: medians over its repetitions, errors of all of them."""
    headers = ["case", "label", "req", "err", "req/s", "out tok/s", "tok/s", "cached"]
    headers += ["TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "p99", "e2e p50", "p99 ms"]
    lines = []
    for row in rows:
        results = row["results"]
        line = [row["case"], row["parameters"]["label"], results["requests"], results["errors"]]
        line += [results["requests_per_s"], results["output_tokens_per_s"]]
        line += [results["total_tokens_per_s"], results["cached_tokens"]]
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
            line += [results[name]["p50"], results[name]["p99"]]
        lines.append(line)
    return format_table(headers, lines)


def _measure(
    case: ServeCase, options: ServeOptions, origin: Origin, server: RunningServer | None
) -> dict[str, Any]:
    """Warm up once, then the repetitions, each with prompts of its own."""
    _warm_up(case, options)
    load_before = check_quiet(least_busy(busy_share), require=options.require_quiet)
    # Where somebody else runs the server, its work cannot be told from that of others.
    meter = LoadMeter() if server else None
    runs = []
    handovers = [measure_handover()]
    for repetition in range(options.repeat):
        rng = _generator(case, options, repetition)
        records, duration = asyncio.run(
            run_load(
                options.target,
                _prompts(case, options, rng),
                output_len=case.output_len,
                concurrency=case.concurrency,
                arrivals=arrival_times(case, rng),
            )
        )
        handovers.append(measure_handover())
        runs.append(summarize(records, duration, case.output_len))
        for message in runs[-1]["error_messages"]:
            print(f"case {case.name}: {message}", file=sys.stderr)
    other_cores = meter.other_cores() if meter else None
    parameters = {
        **asdict(case),
        "label": options.label,
        "model": options.target.model,
        "repeat": options.repeat,
        "seed": options.seed,
        "prompt_format": options.prompt_format,
        "token_ids": options.token_ids,
    }
    return make_row(
        origin,
        benchmark="serve",
        case=parameters.pop("name"),
        parameters=parameters,
        results=median_results(runs, summed=_SUMMED),
        runs=runs,
        handover_ns=handovers,
        server_ready_seconds=server.ready_seconds if server else None,
        server_rss_bytes=process_tree_rss_bytes(server.pid) if server else None,
        server_idle_cores=_idle_cores(server.pid) if server else None,
        load_before=load_before,
        other_cores=other_cores,
    )


def _idle_cores(pid: int) -> float:
    """Cores that a server keeps busy with nothing to do, a moment after its last request."""
    time.sleep(_IDLE_SECONDS)
    before = process_tree_seconds(pid)
    time.sleep(_IDLE_SECONDS)
    return (process_tree_seconds(pid) - before) / _IDLE_SECONDS


def _warm_up(case: ServeCase, options: ServeOptions) -> None:
    """Requests of the case's shape that share nothing with those measured; results are dropped."""
    count = options.warm_up_requests
    if count is None:
        count = case.concurrency or 1
    if count == 0:
        return
    # Repetitions are numbered from 0, so this stream of random numbers is none of theirs.
    rng = _generator(case, options, options.repeat)
    asyncio.run(
        run_load(
            options.target,
            _prompts(case, options, rng, count),
            output_len=min(case.output_len, _WARM_UP_OUTPUT),
            concurrency=case.concurrency,
            arrivals=[0.0] * count,
        )
    )


def _generator(case: ServeCase, options: ServeOptions, repetition: int) -> np.random.Generator:
    """Random numbers that no other case and repetition of this seed get."""
    assert options.seed is not None
    return np.random.default_rng([options.seed, zlib.crc32(case.name.encode()), repetition])


def _prompts(
    case: ServeCase, options: ServeOptions, rng: np.random.Generator, count: int | None = None
) -> list[Any]:
    return make_prompts(
        case,
        rng,
        prompt_format=options.prompt_format,
        token_ids=options.token_ids,
        count=count,
    )
