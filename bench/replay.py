"""Calls of a recording made again, timed or for a profiler: `bench ops --replay FILE`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import LoadMeter
from bench.op_work import work_of
from bench.recorded_call import CallView, operand_bytes
from bench.replay_operands import calls_of
from bench.replay_places import Place, shares
from bench.rows import Origin, append_row, format_table, make_row
from rawpaged.engine.op_recording import Recording
from rawpaged.engine.traced_backend import TracedBackend
from rawpaged.errors import RecordingError
from rawpaged.tracing import Tracer

_MEMORY_SHARE = 0.5
"""Of what is free, for the operands of one call."""
_MOST_COPIES = 512
_MOST_COPIED_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Which calls of a recording to make, and how often."""

    ops: Sequence[str] = ()
    """Names; empty: all."""
    only: Sequence[int] = ()
    """Numbers of calls in the recording; empty: all."""
    calls: int | None = None
    """Make each so often and time nothing; None: time them."""
    seconds: float = 0.25
    seed: int = 0
    output: Path | None = None


def run_replay(
    recording: Recording, source: str, place: Place, options: ReplayOptions, origin: Origin
) -> int:
    """Make the calls asked for and print them; returns how many could not be made.

    Raises RecordingError where there is nothing to make.
    """
    chosen = chosen_calls(recording, options)
    counts = Counter(call for step in recording.steps for call in step.calls)
    failures, rows = 0, []
    for index in chosen:
        view = CallView(recording, recording.calls[index], place.backend)
        meter = LoadMeter()
        try:
            results = _run(view, place, options)
        except (RecordingError, ValueError, TypeError, MemoryError) as error:
            print(f"call {index}, {view.label}: {error}", file=sys.stderr)
            failures += 1
            continue
        row = make_row(
            origin,
            benchmark="ops",
            case=f"{view.call.op}/replay",
            parameters={
                "op": view.call.op,
                "call": index,
                "shape": view.label,
                "count": counts[index],
                "steps": len(recording.steps),
                "recording": source,
                "recorded_on": recording.about.device,
                "seed": options.seed,
                **place.parameters,
            },
            results=results,
            peaks={"bytes_per_s": place.bytes_per_s, "flops_per_s": place.flops_per_s},
            load_before=None,
            other_cores=meter.other_cores(),
        )
        append_row(options.output, row)
        rows.append(row)
    print(calls_table(rows) if options.calls else times_table(rows, place))
    return failures


def chosen_calls(recording: Recording, options: ReplayOptions) -> list[int]:
    """Numbers of the calls asked for. Raises RecordingError for those that are not there."""
    known = {call.op for call in recording.calls}
    if unknown := set(options.ops) - known:
        raise RecordingError(f"{sorted(unknown)} were not called; {', '.join(sorted(known))} were")
    most = len(recording.calls) - 1
    if outside := [index for index in options.only if not 0 <= index <= most]:
        raise RecordingError(f"there are no calls {outside}; they are numbered from 0 to {most}")
    return [
        index
        for index, call in enumerate(recording.calls)
        if (not options.ops or call.op in options.ops)
        and (not options.only or index in options.only)
    ]


def make_calls(view: CallView, copies: int, seed: int, free_bytes: int) -> list[partial[Any]]:
    """A call over up to `copies` copies of its weights or KV, as many as fit.

    Raises RecordingError where not even one does.
    """
    shared, stored = operand_bytes(view)
    if shared + stored > free_bytes:
        raise RecordingError(
            f"its operands take {(shared + stored) / 1e9:.3g} GB of the "
            f"{free_bytes / 1e9:.3g} GB that may be used"
        )
    copied = min(free_bytes - shared, _MOST_COPIED_BYTES)
    fitting = max(1, copied // stored) if stored else _MOST_COPIES
    return calls_of(view, min(copies, fitting, _MOST_COPIES), seed)


def times_table(rows: Sequence[dict[str, Any]], place: Place) -> str:
    """One line a call, the costliest in all steps first."""
    headers = ["call", "#", "count", "n", "median us", "min", "p95", "MB", "MFLOP", "GB/s"]
    headers += ["GFLOP/s", f"% {place.bandwidth_name}", "% peak", "ms in all"]
    lines: list[list[object]] = []
    for row in rows:
        parameters, results = row["parameters"], row["results"]
        total = parameters["count"] * results["median_us"] / 1e3
        lines.append(
            [
                parameters["shape"],
                parameters["call"],
                parameters["count"],
                *(results[name] for name in ("calls", "median_us", "min_us", "p95_us")),
                results["bytes"] / 1e6,
                results["flops"] / 1e6,
                results["gb_per_s"],
                results["gflop_per_s"],
                _percent(results["bandwidth_share"]),
                _percent(results["peak_share"]),
                total,
            ]
        )
    lines.sort(key=lambda line: -float(str(line[-1])))
    return format_table(headers, lines)


def calls_table(rows: Sequence[dict[str, Any]]) -> str:
    """What was run, without times."""
    headers = ["call", "#", "count", "made", "MB", "MFLOP"]
    lines = [
        [
            row["parameters"]["shape"],
            row["parameters"]["call"],
            row["parameters"]["count"],
            row["results"]["calls"],
            row["results"]["bytes"] / 1e6,
            row["results"]["flops"] / 1e6,
        ]
        for row in rows
    ]
    return format_table(headers, lines)


def _run(view: CallView, place: Place, options: ReplayOptions) -> dict[str, object]:
    work = work_of(view)
    free_bytes = int(_MEMORY_SHARE * view.backend.memory_info()[0])
    if options.calls:
        _run_profiled(view, place, options, free_bytes)
        return {"calls": options.calls, "bytes": work.num_bytes, "flops": work.num_flops}
    copies = place.cold_copies(work.num_bytes)
    calls = make_calls(view, copies, options.seed, free_bytes)
    timing = place.time(view.call.op, calls, options.seconds)
    bytes_per_s, flops_per_s = work.num_bytes / timing.median, work.num_flops / timing.median
    return {
        **timing.microseconds(),
        "bytes": work.num_bytes,
        "flops": work.num_flops,
        "gb_per_s": bytes_per_s / 1e9,
        "gflop_per_s": flops_per_s / 1e9,
        **shares(place, bytes_per_s, flops_per_s),
        "copies": len(calls),
    }


def _run_profiled(view: CallView, place: Place, options: ReplayOptions, free_bytes: int) -> None:
    """Run between the profiler's start and stop, each call a range named as in a trace."""
    (call,) = make_calls(view, 1, options.seed, free_bytes)
    call()
    sink = view.backend.start_profiler()
    try:
        traced = TracedBackend(view.backend, Tracer([] if sink is None else [sink]))
        op = getattr(traced, view.call.op)
        for _ in range(options.calls or 0):
            op(**call.keywords)
    finally:
        view.backend.stop_profiler()


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
