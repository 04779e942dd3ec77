"""Runs some of the checks under compute-sanitizer, each array an allocation of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from bench.gpu.recorder import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target

_PROGRAM = "compute-sanitizer"
_RUNS = (
    ("memcheck", "checks.rows"),
    ("memcheck", "checks.linear"),
    ("memcheck", "checks.attention"),
    ("memcheck", "checks.sampling"),
    ("racecheck", "checks.attention"),
    ("racecheck", "checks.linear"),
    ("synccheck", "checks.attention"),
)
_SECONDS = 45
_ERROR_STATUS = 99
_TIMED_OUT = 124


def check_sanitizer(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """A row for each tool and stage; the checks are the reduced ones."""
    if target.is_simulated:
        recorder.skip("sanitizer", "there is no GPU")
        return
    program = find_sanitizer()
    if program is None:
        recorder.skip("sanitizer", f"{_PROGRAM} is not installed")
        return
    for tool, stage in _RUNS:
        run = partial(_run, program, tool, stage)
        recorder.check(f"sanitizer/{tool}", {"stage": stage}, run)


def find_sanitizer() -> str | None:
    """On the PATH, in a CUDA toolkit, or out of its wheel (nvidia-cuda-sanitizer-api)."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += [folder for folder in Path(root).glob("*/bin") if folder.is_dir()]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which(_PROGRAM, path=path)


def _run(program: str, tool: str, stage: str) -> None:
    """Raises AssertionError with the end of what the tool said."""
    # `timeout` ends the program under the tool too, which the tool alone would leave running.
    command = ["timeout", "--kill-after=5", str(_SECONDS), program, "--tool", tool]
    command += ["--error-exitcode", str(_ERROR_STATUS)]
    command += [sys.executable, "-m", "bench.gpu_suite", "--stage", stage]
    command += ["--reduced", "--no-memory-pool"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != _TIMED_OUT, f"took more than {_SECONDS} s"
    said = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-20000:], sep="\n", file=sys.stderr)
        raise AssertionError(f"exit status {done.returncode}: {' | '.join(said[-3:])}")
