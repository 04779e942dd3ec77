"""`python -m bench.run ops`: its flags, and which of the ways to run ops they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.model_ops import record_model
from bench.op_cases import SMOLLM2_135M
from bench.ops import OpsOptions, run_ops
from bench.replay import ReplayOptions, run_replay
from bench.replay_places import DEVICE_NAMES, open_place
from bench.rows import Origin
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.engine.op_recording import read_recording
from rawpaged.weights.checkpoint import read_model_config

KV_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "int8": "int8"}
"""Caches of bytes by what they may be called; all others have the weights' type."""
_ROWS, _CONTEXTS = (1, 8, 32, 128, 512), (128, 1024)


def add_ops_flags(parser: argparse.ArgumentParser) -> None:
    """Flags without a value say that they were not given, so that none is ignored."""
    add = parser.add_argument
    add("--config", help="config.json, GGUF file or model; default: SmolLM2-135M's shapes")
    add("--ops", nargs="+", default=[], help="only these ops")
    add("--device", choices=DEVICE_NAMES, default="cpu", help="(default: cpu)")
    add("--rows", type=int, nargs="+", help="default: 1 8 32 128 512")
    add("--contexts", type=int, nargs="+", help="tokens of KV; default: 128 1024")
    add(
        "--dtypes",
        nargs="+",
        choices=["bfloat16", "float16", "float32", *BLOCK_TYPES],
        help="of weights and KV; a type of GGUF's blocks: of weights, on the CPU alone; default: "
        "bfloat16 float32 on the CPU, bfloat16 elsewhere, and the "
        "recording's with --replay",
    )
    add(
        "--kv-cache-dtype",
        choices=["auto", *KV_DTYPES],
        help="auto: that of the weights; default: auto, and the recording's with --replay",
    )
    add("--threads", type=int, nargs="+", help="CPU threads; default: all usable cores")
    add("--seconds", type=float, default=0.25, help="time spent on each case")
    add("--seed", type=int, default=0)
    add("--replay", type=Path, metavar="FILE", help="the calls of a recording (rawpaged profile)")
    add("--only", type=int, nargs="+", metavar="N", help="with --replay: calls by their numbers")
    add("--calls", type=int, metavar="N", help="make each call N times for a profiler, untimed")


def run_ops_command(given: argparse.Namespace, origin: Origin) -> int:
    """Run what was asked for; returns how many ops failed. Raises ValueError where flags clash."""
    for name in ("rows", "contexts", "threads"):
        if (least := min(getattr(given, name) or [1])) < 1:
            raise ValueError(f"--{name} {least} must be at least 1")
    blocks = sorted(set(given.dtypes or ()) & BLOCK_TYPES.keys())
    if blocks and (given.replay is not None or given.device != "cpu"):
        raise ValueError(f"--dtypes {blocks[0]} is for the CPU's own cases only")
    if given.replay is None and given.device == "cpu":
        _refuse(given, "with --replay or another --device", "only", "calls", "kv_cache_dtype")
        return run_ops(_cpu_options(given), origin)
    if given.calls is not None and given.calls < 1:
        raise ValueError(f"--calls {given.calls} must be at least 1")
    if given.require_quiet:
        raise ValueError("--require-quiet goes with timing the CPU's own cases only")
    if given.device != "cpu":
        _refuse(given, "on the CPU", "threads")
    if given.replay is None:
        _refuse(given, "with --replay", "only")
        return _run_model_ops(given, origin)
    _refuse(given, "without --replay", "config", "rows", "contexts")
    recording = read_recording(given.replay)
    kv_cache_dtype = given.kv_cache_dtype or recording.about.kv_cache_dtype
    failures = 0
    for dtype in given.dtypes or [recording.about.dtype]:
        for threads in given.threads or [None]:
            place = open_place(
                given.device,
                dtype=dtype,
                kv_cache_dtype=KV_DTYPES.get(kv_cache_dtype),
                threads=threads,
                measures=given.calls is None,
            )
            try:
                failures += run_replay(
                    recording, given.replay.name, place, _replay_options(given), origin
                )
            finally:
                place.close()
    return failures


def _run_model_ops(given: argparse.Namespace, origin: Origin) -> int:
    """A layer of a model's shape on a device."""
    model = read_model_config(given.config) if given.config else SMOLLM2_135M
    rows, contexts = given.rows or _ROWS, given.contexts or _CONTEXTS
    failures = 0
    for dtype in given.dtypes or ["bfloat16"]:
        place = open_place(
            given.device,
            dtype=dtype,
            kv_cache_dtype=KV_DTYPES.get(given.kv_cache_dtype or "auto"),
            measures=given.calls is None,
        )
        try:
            recording = record_model(place.backend, model, rows, contexts)
            source = given.config or "smollm2-135m"
            failures += run_replay(recording, source, place, _replay_options(given), origin)
        finally:
            place.close()
    return failures


def _refuse(given: argparse.Namespace, where: str, *names: str) -> None:
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has a meaning {where} only")


def _cpu_options(given: argparse.Namespace) -> OpsOptions:
    chosen = {
        name: getattr(given, name)
        for name in ("rows", "contexts", "dtypes", "threads")
        if getattr(given, name) is not None
    }
    if "float16" in chosen.get("dtypes", ()):
        raise ValueError("the CPU backend has bfloat16 and float32, not float16")
    return OpsOptions(
        config=given.config,
        ops=given.ops,
        seconds=given.seconds,
        seed=given.seed,
        require_quiet=given.require_quiet,
        output=given.output,
        **chosen,
    )


def _replay_options(given: argparse.Namespace) -> ReplayOptions:
    return ReplayOptions(
        ops=given.ops,
        only=given.only or (),
        calls=given.calls,
        seconds=given.seconds,
        seed=given.seed,
        output=given.output,
    )
