"""The command line: `python -m bench.run BENCHMARK`; see README.md."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from bench.breakdown import BreakdownOptions, run_breakdown
from bench.engine import EngineOptions, default_cases, run_engine
from bench.load import Target
from bench.ops_command import add_ops_flags, run_ops_command
from bench.perplexity import DEFAULT_TEXT, PerplexityOptions, run_perplexity
from bench.presets import PRESETS, ServeCase
from bench.quiet import BusyMachineError
from bench.rows import Origin, command_line
from bench.serve import ServeOptions, run_serve
from bench.server_process import ServerFailedError
from rawpaged.errors import RawpagedError

_CASE_DEFAULTS = {
    "num_requests": 32,
    "prompt_len": 128,
    "output_len": 128,
    "shared_prefix_len": 0,
}
_CASE_ARRIVALS = ("concurrency", "request_rate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark. 0: all went well; 1: errors or wrong results; 2: it could not run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    try:
        origin = Origin(command_line(given))
        if options.benchmark == "serve":
            failures = run_serve(_serve_options(options), origin)
        elif options.benchmark == "ops":
            failures = run_ops_command(options, origin)
        elif options.benchmark == "engine":
            failures = run_engine(_engine_options(options), origin)
        elif options.benchmark == "breakdown":
            failures = run_breakdown(_breakdown_options(options), origin)
        else:
            failures = run_perplexity(_perplexity_options(options), origin)
    except (
        BusyMachineError,
        ServerFailedError,
        RawpagedError,
        OSError,
        ValueError,
        aiohttp.ClientError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description="Measure, print a table, append JSON lines."
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    _add_serve(commands.add_parser("serve", help="any server with the OpenAI completions API"))
    add_ops_flags(commands.add_parser("ops", help="each op of a backend, or a recording's calls"))
    _add_engine(commands.add_parser("engine", help="the engine in this process, without HTTP"))
    for command in commands.choices.values():
        command.add_argument(
            "--require-quiet", action="store_true", help="refuse to measure on a busy machine"
        )
    _add_breakdown(commands.add_parser("breakdown", help="a server's time by its parts"))
    _add_perplexity(commands.add_parser("perplexity", help="quality by type of weights and KV"))
    for command in commands.choices.values():
        command.add_argument("--output", type=Path, help="file that rows are appended to")
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--model", default="", help="name in requests; default: the server's first")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--label", default="rawpaged", help="name of the server in rows: rawpaged, vllm, ...")
    add("--preset", nargs="+", choices=[*PRESETS, "all"], help="named cases instead of one's own")
    add("--num-requests", type=int, help="default 32")
    add("--concurrency", type=int, help="requests under way at once; default 1")
    add("--request-rate", type=float, help="Poisson arrivals a second, instead of --concurrency")
    add("--prompt-len", type=int, help="tokens, shared prefix included; default 128")
    add("--output-len", type=int, help="default 128")
    add("--shared-prefix-len", type=int, help="default 0")
    add("--prompt-format", choices=["ids", "text"], default="ids")
    add("--token-ids", type=_id_range, default=(1000, 30000), metavar="LOW:HIGH")
    add("--seed", type=int, help="default: a new one, so that no prompt is in a prefix cache")
    add("--repeat", type=int, default=1, help="repetitions; results are their medians")
    add("--warm-up-requests", type=int, help="default: as many as the concurrency")
    add("--timeout", type=float, default=600.0, help="seconds for one request")
    add("--server-command", help="start this server, and stop it with SIGTERM afterwards")
    add("--server-timeout", type=float, default=600.0, help="seconds until /health must answer")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    add("--prompt-len", type=int, default=128)
    add("--output-len", type=int, default=128)
    add("--prefill-len", type=int, default=1024)
    add("--dtype", default="auto")
    add("--threads", type=int, help="default: all usable cores")
    add("--load-format", default="auto", help="dummy: random weights, no file needed")
    add("--max-num-batched-tokens", type=int, default=512)
    add("--repeat", type=int, default=1, help="repetitions; results are their medians")
    add("--seed", type=int)


def _add_breakdown(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--dtype", default="auto")
    add("--threads", type=int, help="default: all usable cores")
    add("--preset", nargs="+", choices=PRESETS, default=["a", "b", "c"])
    add("--token-ids", default="1000:30000", metavar="LOW:HIGH")


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add(
        "--variants",
        nargs="+",
        default=["dtype=float32", "dtype=bfloat16"],
        metavar="NAME=VALUE,...",
        help="fields of the engine's configuration; the first variant is the reference",
    )
    add("--text", type=Path, default=DEFAULT_TEXT, help="UTF-8 file")
    add("--window", type=int, default=512, help="tokens of a prompt")
    add("--threads", type=int, help="default: all usable cores")


def _serve_options(options: argparse.Namespace) -> ServeOptions:
    return ServeOptions(
        target=Target(options.url, options.model, options.api_key, options.timeout),
        label=options.label,
        cases=_serve_cases(options),
        repeat=options.repeat,
        seed=options.seed,
        prompt_format=options.prompt_format,
        token_ids=options.token_ids,
        warm_up_requests=options.warm_up_requests,
        server_command=options.server_command,
        server_timeout=options.server_timeout,
        require_quiet=options.require_quiet,
        output=options.output,
    )


def _serve_cases(options: argparse.Namespace) -> list[ServeCase]:
    own = {name: getattr(options, name) for name in (*_CASE_DEFAULTS, *_CASE_ARRIVALS)}
    if options.preset:
        for name, value in own.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is part of a case, which --preset chooses: not both")
        names = PRESETS if "all" in options.preset else options.preset
        return [PRESETS[name] for name in names]
    if own["concurrency"] is None and own["request_rate"] is None:
        own["concurrency"] = 1
    lengths = {
        name: default if own[name] is None else own[name]
        for name, default in _CASE_DEFAULTS.items()
    }
    return [ServeCase(name="custom", **(own | lengths))]


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        model=options.model,
        cases=default_cases(
            options.batch_sizes, options.prompt_len, options.output_len, options.prefill_len
        ),
        dtype=options.dtype,
        num_threads=options.threads,
        load_format=options.load_format,
        max_num_batched_tokens=options.max_num_batched_tokens,
        repeat=options.repeat,
        seed=options.seed,
        require_quiet=options.require_quiet,
        output=options.output,
    )


def _breakdown_options(options: argparse.Namespace) -> BreakdownOptions:
    return BreakdownOptions(
        model=options.model,
        cases=[PRESETS[name] for name in options.preset],
        dtype=options.dtype,
        num_threads=options.threads,
        token_ids=options.token_ids,
        output=options.output,
    )


def _perplexity_options(options: argparse.Namespace) -> PerplexityOptions:
    return PerplexityOptions(
        model=options.model,
        variants=options.variants,
        text=options.text,
        window=options.window,
        num_threads=options.threads,
        output=options.output,
    )


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH with LOW < HIGH")
    return int(low), int(high)


if __name__ == "__main__":
    sys.exit(main())
