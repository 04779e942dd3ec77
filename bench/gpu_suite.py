"""Everything to run when a GPU is at hand, as one command of under ten minutes; see README.md.

Each stage is a process of its own with a limit, so that a kernel that hangs or breaks the device's
context takes its own stage with it and no other. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.recorder import Recorder, error_line
from bench.gpu.sizes import FULL, REDUCED
from bench.gpu.target import GpuTarget, SimulatedTarget, Target, has_gpu
from bench.rows import Origin, command_line

_ROOT = Path(__file__).resolve().parent.parent
_SECONDS = 570.0
"""For all stages together; what has not begun by then is left out, with a row that says so."""
_LEAST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A function (target, recorder, sizes) of a module, and the seconds it may take."""

    name: str
    module: str
    function: str
    seconds: float


STAGES = (
    Stage("checks.rows", "bench.gpu.checks", "check_rows", 90),
    Stage("checks.linear", "bench.gpu.checks", "check_linear", 120),
    Stage("checks.attention", "bench.gpu.attention_checks", "check_attention", 120),
    Stage("checks.sampling", "bench.gpu.checks", "check_sampling", 60),
    Stage("checks.engine", "bench.gpu.engine_checks", "check_engine", 120),
    Stage("copy", "bench.gpu.copies", "time_copies", 30),
    Stage("launch", "bench.gpu.launch", "time_launches", 60),
    Stage("attention.decode", "bench.gpu.attention", "time_decode", 120),
    Stage("step", "bench.gpu.step", "time_steps", 120),
    Stage("matmul", "bench.gpu.matmul", "time_matmuls", 90),
    Stage("attention.bytes", "bench.gpu.attention", "time_decode_of_bytes", 60),
    Stage("attention.prefill", "bench.gpu.attention", "time_prefill", 60),
    Stage("copy.host", "bench.gpu.copies", "time_host_copies", 30),
    Stage("copy.blocks", "bench.gpu.copies", "time_block_copies", 30),
    Stage("transformers", "bench.gpu.transformers", "time_transformers", 90),
    Stage("row_ops", "bench.gpu.rowwise", "time_row_ops", 60),
    Stage("tiles", "bench.gpu.tiles", "time_tiles", 90),
    Stage("sanitizer", "bench.gpu.sanitizer", "check_sanitizer", 200),
)
"""In the order in which a session that is cut short would miss them least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the suite was asked for."""

    output: Path | None
    only: Sequence[str]
    reduced: bool
    simulate: bool
    memory_pool: bool
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all went well; 1: a check was wrong or a stage did not end; 2: no such stage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    parsed = parser.parse_args(given)
    options = Options(
        output=parsed.output,
        only=parsed.only.split(",") if parsed.only else (),
        reduced=parsed.reduced,
        simulate=parsed.simulate,
        memory_pool=not parsed.no_memory_pool,
        seconds=parsed.seconds,
    )
    origin = Origin(command_line(given, program="bench.gpu_suite"))
    if parsed.stage:
        return run_stage(_stage(parsed.stage), options, origin)
    unknown = [name for name in options.only if not chosen_stages((name,))]
    if unknown:
        names = ", ".join(stage.name for stage in STAGES)
        wrong = ", ".join(unknown)
        print(f"error: no stage is called {wrong}; there are {names}", file=sys.stderr)
        return 2
    return run_stages(chosen_stages(options.only), options, origin)


def chosen_stages(only: Sequence[str]) -> list[Stage]:
    """Those named, or whose name begins with one given and a dot; all if none is given."""
    return [
        stage
        for stage in STAGES
        if not only or any(f"{stage.name}.".startswith(f"{name}.") for name in only)
    ]


def run_stages(stages: Sequence[Stage], options: Options, origin: Origin) -> int:
    """Run each in a process of its own, within what is left of the time; 1 if any failed."""
    simulate = options.simulate or not has_gpu()
    print("no GPU: running a little of it over the simulator" if simulate else "running on a GPU")
    started, failed = time.monotonic(), False
    for stage in stages:
        recorder = Recorder(
            stage=stage.name,
            origin=origin,
            output=options.output,
            device={},
            is_simulated=simulate,
        )
        left = options.seconds - (time.monotonic() - started)
        if left < _LEAST_SECONDS:
            recorder.skip(stage.name, f"all {options.seconds:.0f} s are used up")
            continue
        failed |= _run_child(stage, options, recorder, min(stage.seconds, left))
    print(f"{time.monotonic() - started:.0f} s", "with failures" if failed else "without failures")
    return int(failed)


def run_stage(stage: Stage, options: Options, origin: Origin) -> int:
    """Run one stage in this process; 1 if any of its cases failed."""
    # Numba reads this when it is imported, which the stages' modules do.
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1" if options.simulate else "0")
    recorder = Recorder(
        stage=stage.name,
        origin=origin,
        output=options.output,
        device={},
        is_simulated=options.simulate,
    )
    started = time.monotonic()
    try:
        target = _open_target(options)
        recorder.device = target.describe()
        run = getattr(importlib.import_module(stage.module), stage.function)
        run(target, recorder, REDUCED if options.reduced or options.simulate else FULL)
    except Exception as error:
        traceback.print_exc()
        recorder.fail(stage.name, {}, error_line(error), time.monotonic() - started)
    return int(recorder.failures > 0)


def _run_child(stage: Stage, options: Options, recorder: Recorder, seconds: float) -> bool:
    """Whether the stage failed; a row if it could not write one itself."""
    command = [sys.executable, "-m", "bench.gpu_suite", "--stage", stage.name]
    flags: Mapping[str, bool] = {
        "--simulate": recorder.is_simulated,
        "--reduced": options.reduced,
        "--no-memory-pool": not options.memory_pool,
    }
    command += [flag for flag, is_set in flags.items() if is_set]
    if options.output is not None:
        command += ["--output", str(options.output.resolve())]
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=_ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The whole session that it leads: a stage may have started programs.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        recorder.fail(stage.name, {}, f"took more than {seconds:.3g} s", seconds)
        return True
    print(said, end="", file=sys.stderr)
    if process.returncode not in (0, 1):
        last = (said.strip().splitlines() or ["nothing was said"])[-1]
        error = f"exit status {process.returncode}: {last}"
        recorder.fail(stage.name, {}, error, time.monotonic() - started)
    return process.returncode != 0


def _open_target(options: Options) -> Target:
    return SimulatedTarget() if options.simulate else GpuTarget(memory_pool=options.memory_pool)


def _stage(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_suite", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, help="file that rows are appended to")
    add("--only", help="stages by name, separated by commas; checks stands for all checks.*")
    add("--reduced", action="store_true", help="a little of everything; always so simulated")
    add("--simulate", action="store_true", help="over the simulator though there is a GPU")
    add("--no-memory-pool", action="store_true", help="each array an allocation, for sanitizers")
    add("--seconds", type=float, default=_SECONDS, help="for all stages (default: %(default)s)")
    add("--stage", choices=[stage.name for stage in STAGES], help="this one in this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
