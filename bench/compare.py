"""Servers side by side: `python -m bench.compare --peers vllm,llamacpp`; see README.md.

Each turn starts one server after the other and drives it through the same cases, so that what
changes on the machine over time meets all of them. Nothing is installed: where a peer runs, or how
it is started, is said on the command line.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.limits import ModelWork, least_seconds, work_of_model
from bench.load import Target
from bench.machine import usable_cores
from bench.presets import PRESETS, ServeCase
from bench.probes import Peaks, measure_peaks
from bench.quiet import BusyMachineError
from bench.rows import Origin, append_row, command_line, format_table, make_row
from bench.serve import ServeOptions, measure_server
from bench.server_process import ServerFailedError
from rawpaged.errors import RawpagedError

OURS = "rawpaged"
_DEFAULT_URL = "http://127.0.0.1:8000"

_Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One of the servers compared."""

    label: str
    url: str
    command: str | None
    """Starts it for its part of each turn; None: it runs already."""
    model: str = ""
    """Its name in requests; empty: the server's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What `bench.compare` was asked for; the first server is the one others are measured by."""

    servers: Sequence[Server]
    cases: Sequence[ServeCase]
    repeat: int
    seed: int
    timeout: float
    server_timeout: float
    require_quiet: bool
    output: Path | None
    limits: ModelWork | None = None
    """Of the model that ours serves: with it, the least time of each case is told."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all went well; 1: requests failed; 2: it could not run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    try:
        options = _options(parser, parser.parse_args(given))
        rows = run_compare(options, Origin(command_line(given, program="bench.compare")))
    except (
        BusyMachineError,
        ServerFailedError,
        RawpagedError,
        aiohttp.ClientError,
        OSError,
        ValueError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(row["results"]["errors"] for row in rows) else 0


def run_compare(options: CompareOptions, origin: Origin) -> list[dict[str, Any]]:
    """All rows of all turns; prints the tables and appends a row of medians for each case."""
    rows: list[dict[str, Any]] = []
    peaks: list[Peaks] = []
    for turn in range(options.repeat):
        if options.limits is not None:
            peaks.append(measure_peaks(usable_cores()))
        for server in options.servers:
            print(f"turn {turn + 1} of {options.repeat}: {server.label}", file=sys.stderr)
            rows += measure_server(_serve_options(options, server, turn), origin)
    labels = [server.label for server in options.servers]
    limits = case_limits(options, best_of(peaks)) if options.limits is not None else None
    for case in options.cases:
        append_row(
            options.output,
            make_row(
                origin,
                benchmark="compare",
                case=case.name,
                parameters={"labels": labels, "repeat": options.repeat, "seed": options.seed},
                results=compared(rows, labels, case)
                | ({"limit": limits[case.name]} if limits else {}),
                peaks=_peak_fields(best_of(peaks)) if peaks else None,
                load_before=None,
                other_cores=None,
            ),
        )
    print(rates_table(rows, labels, options.cases, limits))
    print()
    print(servers_table(rows, labels))
    return rows


def rate_name(case: ServeCase) -> str:
    """The rate that a case is about: output tokens, but all tokens where prefill is the work."""
    return "output_tokens_per_s" if case.prompt_len <= case.output_len else "total_tokens_per_s"


def compared(rows: _Rows, labels: Sequence[str], case: ServeCase) -> dict[str, Any]:
    """Medians over turns of one case by label, and the first label's rate over each other's.

    None over a server of which every request failed.
    """
    name = rate_name(case)
    rates = {label: _median(rows, label, case.name, name) for label in labels}
    return {
        "rate": name,
        "medians": rates,
        "ratios": {
            label: rates[labels[0]] / rates[label] if rates[label] else None for label in labels[1:]
        },
        "errors": sum(row["results"]["errors"] for row in rows if row["case"] == case.name),
    }


def case_limits(options: CompareOptions, peaks: Peaks) -> dict[str, float]:
    """By case, its rate if nothing took time but the least of reading and computing."""
    assert options.limits is not None
    limits = {}
    for case in options.cases:
        tokens = case.num_requests * case.output_len
        if rate_name(case) == "total_tokens_per_s":
            tokens += case.num_requests * case.prompt_len
        limits[case.name] = tokens / least_seconds(options.limits, case, peaks)
    return limits


def best_of(peaks: Sequence[Peaks]) -> Peaks:
    """The highest of each."""
    return Peaks(
        max(each.read_bytes_per_s for each in peaks),
        {
            product: max(each.flops_per_s[product] for each in peaks)
            for product in peaks[0].flops_per_s
        },
    )


def rates_table(
    rows: _Rows,
    labels: Sequence[str],
    cases: Sequence[ServeCase],
    limits: Mapping[str, float] | None = None,
) -> str:
    """A line a case: the median rate of each server, and how many times theirs ours is.

    With limits also these, and how much of them ours is.
    """
    headers = ["case", "tok/s of", *labels, *(f"x {label}" for label in labels[1:])]
    if limits:
        headers += ["limit", "% of it"]
    lines = []
    for case in cases:
        results = compared(rows, labels, case)
        kind = "output" if results["rate"].startswith("output") else "prompt + output"
        line = [case.name, kind, *results["medians"].values(), *results["ratios"].values()]
        if limits:
            limit = limits[case.name]
            line += [limit, 100 * results["medians"][labels[0]] / limit]
        lines.append(line)
    return format_table(headers, lines)


def servers_table(rows: _Rows, labels: Sequence[str]) -> str:
    """A line a server: time until ready, most memory seen, cores used with nothing to do."""
    headers = ["server", "ready s", "RSS MB", "idle cores", "errors"]
    lines: list[list[object]] = []
    for label in labels:
        own = [row for row in rows if row["parameters"]["label"] == label]
        lines.append(
            [
                label,
                _over(statistics.median, own, "server_ready_seconds"),
                _over(max, own, "server_rss_bytes", 1e-6),
                _over(statistics.median, own, "server_idle_cores"),
                sum(row["results"]["errors"] for row in own),
            ]
        )
    return format_table(headers, lines)


def _peak_fields(peaks: Peaks) -> dict[str, float]:
    fields = {f"{name}_gflop_per_s": rate / 1e9 for name, rate in peaks.flops_per_s.items()}
    return {"read_gb_per_s": peaks.read_bytes_per_s / 1e9, **fields}


def _median(rows: _Rows, label: str, case: str, name: str) -> float:
    values: list[float] = [
        row["results"][name]
        for row in rows
        if row["case"] == case and row["parameters"]["label"] == label
    ]
    return statistics.median(values)


def _over(reduce: Any, rows: _Rows, name: str, unit: float = 1.0) -> float | None:
    """None where somebody else started the server, so that nothing is known of its process."""
    values = [row[name] for row in rows if row[name] is not None]
    return reduce(values) * unit if values else None


def _serve_options(options: CompareOptions, server: Server, turn: int) -> ServeOptions:
    return ServeOptions(
        target=Target(server.url, server.model, None, options.timeout),
        label=server.label,
        cases=options.cases,
        # Each turn has prompts of its own, the same for all servers.
        seed=options.seed + turn,
        server_command=server.command,
        server_timeout=options.server_timeout,
        require_quiet=options.require_quiet,
        output=options.output,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description="Drive servers by turns through the same cases; print rates and ratios.",
    )
    add = parser.add_argument
    add("--peers", required=True, metavar="NAME,NAME", help="labels of the servers beside ours")
    add("--ours", default=OURS, help="label of the server that the others are measured by")
    add(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help=f"where a server answers; {OURS}: {_DEFAULT_URL}",
    )
    add(
        "--command",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="start it with this for its part of a turn, without a shell (env A=B ... is a "
        "command too); without, it has to run already",
    )
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="name in requests; default: the server's first",
    )
    add("--preset", nargs="+", choices=[*PRESETS, "all"], default=["all"])
    add("--repeat", type=int, default=3, help="turns; results are medians over them")
    add("--seed", type=int, help="default: a new one, so that no prompt is in a prefix cache")
    add("--timeout", type=float, default=600.0, help="seconds for one request")
    add("--server-timeout", type=float, default=600.0, help="seconds until /health must answer")
    add(
        "--limits",
        metavar="MODEL[:DTYPE]",
        help="tell the least time of each case with this model on this machine, of whose peaks it "
        "is made, measured before each turn",
    )
    add("--require-quiet", action="store_true", help="refuse to measure on a busy machine")
    add("--output", type=Path, help="file that rows are appended to")
    return parser


def _options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> CompareOptions:
    """Checked options; exits through the parser for names that do not fit together."""
    labels = [given.ours, *given.peers.split(",")]
    if len(set(labels)) < len(labels) or not all(labels):
        parser.error(f"--peers {given.peers!r} with --ours {given.ours!r} are not distinct names")
    if given.repeat < 1:
        parser.error(f"--repeat {given.repeat} must be at least 1")
    urls = {given.ours: _DEFAULT_URL, **_named(parser, "--url", given.url, labels)}
    commands = _named(parser, "--command", given.command, labels)
    models = _named(parser, "--model", given.model, labels)
    for label in labels:
        if label not in urls:
            parser.error(f"say where {label} answers: --url {label}=http://127.0.0.1:PORT")
    names = PRESETS if "all" in given.preset else given.preset
    return CompareOptions(
        servers=[
            Server(
                label=label,
                url=urls[label],
                command=commands.get(label),
                model=models.get(label, ""),
            )
            for label in labels
        ],
        cases=[PRESETS[name] for name in names],
        repeat=given.repeat,
        seed=secrets.randbits(32) if given.seed is None else given.seed,
        timeout=given.timeout,
        server_timeout=given.server_timeout,
        require_quiet=given.require_quiet,
        output=given.output,
        limits=_limits(given.limits),
    )


def _limits(given: str | None) -> ModelWork | None:
    if given is None:
        return None
    model, _, dtype = given.partition(":")
    return work_of_model(model, dtype or "auto")


def _named(
    parser: argparse.ArgumentParser, flag: str, values: Sequence[str], labels: Sequence[str]
) -> dict[str, str]:
    """NAME=VALUE by name; a name that is no server's is an error."""
    named = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not value or name not in labels:
            parser.error(f"{flag} {text!r} is not NAME=VALUE with a NAME of {', '.join(labels)}")
        named[name] = value
    return named


if __name__ == "__main__":
    sys.exit(main())
