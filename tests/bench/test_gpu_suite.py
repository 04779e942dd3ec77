"""The suite for GPUs over the simulator: that it runs, and that it outlives what goes wrong."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu.recorder import Recorder
from bench.gpu.sanitizer import find_sanitizer
from bench.gpu.sizes import FULL, REDUCED
from bench.gpu.step import floor_seconds, model_config
from bench.gpu.target import SimulatedTarget, fill
from bench.gpu.timing import Work, cold_copies, graph_rounds, summarize, time_device, time_replays
from bench.gpu_suite import STAGES, Options, Stage, chosen_stages, main, run_stages
from bench.roofline import LLAMA_3_8B, Step
from bench.rows import Origin
from bench.timing import Timing
from tests.gpu.conftest import numba_cuda
from tests.hostsim.wheels import CudaWheels

__all__ = ["numba_cuda"]

ORIGIN = Origin("command", commit="", machine={})
LEFT_OUT = {"matmul/cublas", "attention/torch", "transformers", "sanitizer"}
"""What there is nothing to compare with for, or no GPU."""
FIELDS = {
    *("schema", "benchmark", "case", "parameters", "results", "stage", "status", "simulated"),
    *("peaks", "seconds", "device", "load_before", "other_cores", "date", "commit", "command"),
    "machine",
}


def options(output: Path, seconds: float = 60.0) -> Options:
    return Options(
        output=output, only=(), reduced=True, simulate=True, memory_pool=True, seconds=seconds
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorder(output: Path | None = None) -> Recorder:
    return Recorder(
        stage="stage", origin=ORIGIN, output=output, device={"name": "none"}, is_simulated=True
    )


@pytest.fixture
def target(cuda_wheels: CudaWheels) -> SimulatedTarget:
    return SimulatedTarget()


@pytest.mark.gpusim
@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
def test_the_suite_reaches_its_end_over_the_simulator(tmp_path: Path) -> None:
    output = tmp_path / "rows" / "gpu.jsonl"
    given = ["--reduced", "--simulate", "--seconds", "3600", "--output", str(output)]
    assert main(given) == 0
    rows = read(output)
    stages = [stage.name for stage in STAGES]
    assert list(dict.fromkeys(row["stage"] for row in rows)) == stages
    for row in rows:
        assert set(row) == FIELDS
        assert row["benchmark"] == "gpu"
        assert row["simulated"]
        assert row["device"]["name"] == "simulator"
        checks = row["stage"].startswith("checks.") or row["case"] == "step/load"
        assert row["status"] == ("passed" if checks else "timed") or row["case"] in LEFT_OUT
    left_out = {row["case"] for row in rows if row["status"] == "skipped"}
    assert left_out == LEFT_OUT
    timed = {row["case"]: row["results"] for row in rows if row["stage"] == "launch"}
    assert set(timed) >= {"empty kernel", "graph", "op/linear", "sample with its copies"}
    assert all(results["us"] > 0 for results in timed.values())


@pytest.mark.gpusim
@pytest.mark.usefixtures("numba_cuda")
def test_a_wrong_kernel_is_a_failed_row_and_the_others_are_checked(
    target: SimulatedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.gpu.checks import check_rows
    from rawpaged.gpu.norm import RmsNorm

    def wrong(self: RmsNorm, out: Any, x: Any, residual: Any, weight: Any, eps: float) -> None:
        out[...] = 0

    monkeypatch.setattr(RmsNorm, "add_rms_norm", wrong)
    recording = recorder(tmp_path / "rows.jsonl")
    check_rows(target, recording, REDUCED)
    rows = read(tmp_path / "rows.jsonl")
    failed = [row for row in rows if row["status"] == "failed"]
    assert [row["case"] for row in failed] == ["add_rms_norm"]
    assert failed[0]["results"]["error"].startswith("AssertionError")
    assert "\n" not in failed[0]["results"]["error"]
    assert recording.failures == 1
    assert rows[-1]["case"] == "copy_blocks/pools"


def test_a_stage_over_its_limit_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    slow = Stage("copy", "bench.gpu.copies", "time_copies", 0.01)
    assert run_stages([slow, slow], options(output), ORIGIN) == 1
    rows = read(output)
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert rows[0]["results"]["error"] == "took more than 0.01 s"


def test_a_stage_that_dies_leaves_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first >&2\necho illegal address >&2\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    output = tmp_path / "rows.jsonl"
    assert run_stages([STAGES[0]], options(output), ORIGIN) == 1
    (row,) = read(output)
    assert row["results"]["error"] == "exit status -9: illegal address"


def test_what_has_not_begun_in_time_is_left_out(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    assert run_stages(STAGES[:2], options(output, seconds=1.0), ORIGIN) == 0
    assert [row["status"] for row in read(output)] == ["skipped"] * 2


def test_a_stage_that_cannot_begin_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setitem(sys.modules, "cupy", None)
    output = tmp_path / "rows.jsonl"
    assert main(["--stage", "copy", "--output", str(output)]) == 1
    (row,) = read(output)
    assert "needs CuPy" in row["results"]["error"]
    assert not row["simulated"]


def test_stages_are_chosen_by_name_and_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_stages(()) == list(STAGES)
    assert [stage.name for stage in chosen_stages(("attention", "checks.rows"))] == [
        "checks.rows",
        "attention.decode",
        "attention.bytes",
        "attention.prefill",
    ]
    assert chosen_stages(("check",)) == []
    assert main(["--only", "check"]) == 2
    assert "no stage is called check" in capsys.readouterr().err
    # Nor is one of several left out without a word.
    assert main(["--only", "copy,matmull"]) == 2
    assert "no stage is called matmull;" in capsys.readouterr().err


def test_all_stages_name_functions_that_are_there() -> None:
    for stage in STAGES:
        module = Path(__file__).parents[2] / f"{stage.module.replace('.', os.sep)}.py"
        assert f"def {stage.function}(target: Target, recorder" in module.read_text()


@pytest.mark.gpusim
def test_fill_repeats_values_to_the_end(
    target: SimulatedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.target._CHUNK_ELEMENTS", 8)
    array = np.zeros((3, 7), np.float32)
    fill(target, array, np.arange(5, dtype=np.float32))
    expected = np.resize(np.resize(np.arange(5), 8), 21).reshape(3, 7)
    np.testing.assert_array_equal(array, expected)


@pytest.mark.gpusim
def test_calls_are_timed_in_turn(target: SimulatedTarget) -> None:
    calls: list[int] = []
    timing = time_device(target, [lambda: calls.append(0), lambda: calls.append(1)], 0.0)
    assert calls == [0, 1, 0, 1]  # to compile, and once
    assert timing.calls == 2
    assert cold_copies(target, 1) == 1


def test_a_graph_is_long_enough_and_its_calls_share_its_time() -> None:
    assert graph_rounds(1e-6, 10) == 100
    assert graph_rounds(0.1e-3, 1) == 21
    assert graph_rounds(1.0, 512) == 1
    durations = iter([8.0, 2.0, 4.0])
    timing = time_replays(lambda work: next(durations), lambda: None, 0.0, 4, fewest=3)
    assert (timing.calls, timing.median, timing.best) == (12, 1.0, 0.5)


def test_rates_and_shares() -> None:
    timing = Timing(10, 2e-3, 1e-3, 3e-3)
    results = summarize(timing, Work(4_000_000, 6_000_000_000), copy_bytes_per_s=8e9)
    assert results["gb_per_s"] == pytest.approx(2.0)
    assert results["tflop_per_s"] == pytest.approx(3.0)
    assert results["copy_share"] == pytest.approx(0.25)
    assert summarize(timing, Work(1))["copy_share"] is None


@pytest.mark.gpusim
def test_the_floor_is_reading_weights_and_keys(target: SimulatedTarget) -> None:
    least = 2 * (LLAMA_3_8B.weight_bytes // 2 - LLAMA_3_8B.vocab_size * LLAMA_3_8B.hidden_size)
    floor = floor_seconds(target, LLAMA_3_8B, Step(1, 1, 1024), 4e12)
    assert least / 4e12 < floor < 1.02 * least / 4e12
    config = model_config(FULL.model, 2048)
    assert config.num_parameters * 2 == pytest.approx(LLAMA_3_8B.weight_bytes, rel=1e-3)
    assert math.isfinite(floor)


def test_sanitizers_are_found_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    assert find_sanitizer() == str(program)
