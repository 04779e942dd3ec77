"""Recorded ops made again: on the CPU, and on simulated kernels under the checker."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.target import SimulatedTarget
from bench.recorded_call import CallView, operand_bytes, used_blocks
from bench.replay import ReplayOptions, chosen_calls, make_calls, run_replay
from bench.replay_places import DevicePlace, Place, open_place
from bench.run import main
from rawpaged.cpu.backend import CpuBackend
from rawpaged.engine.op_recorder import RECORDED_OPS
from rawpaged.engine.op_recording import Recording, write_recording
from rawpaged.errors import BackendError, RecordingError
from tests.bench.recordings import ORIGIN, llama, outputs, place, record_engine, recording, views
from tests.gpu.conftest import numba_cuda
from tests.hostsim.wheels import CudaWheels

__all__ = ["llama", "numba_cuda", "place", "recording"]

QUICK = ReplayOptions(seconds=0.0, seed=3)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Making the calls again


def test_every_call_is_made_and_timed(
    recording: Recording, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("bench.op_cases.last_level_cache_bytes", lambda: 2**10)
    output = tmp_path / "rows.jsonl"
    options = dataclasses.replace(QUICK, output=output)
    assert run_replay(recording, "ops.json", place, options, ORIGIN) == 0
    rows = read(output)
    assert [row["parameters"]["call"] for row in rows] == list(range(len(recording.calls)))
    counts = [0] * len(recording.calls)
    for step in recording.steps:
        for call in step.calls:
            counts[call] += 1
    assert [row["parameters"]["count"] for row in rows] == counts
    for row in rows:
        results = row["results"]
        assert results["calls"] >= 5
        assert results["bytes"] > 0
        assert results["gb_per_s"] == pytest.approx(
            results["bytes"] / results["median_us"] / 1e3, rel=1e-4
        )
        assert results["bandwidth_share"] is results["peak_share"] is None
    lines = capsys.readouterr().out.splitlines()
    totals = [float(line.split()[-1]) for line in lines[2:]]
    assert len(totals) == len(rows)
    assert totals == sorted(totals, reverse=True)


def test_calls_for_a_profiler_are_made_as_often_as_asked(
    recording: Recording, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for op in ("linear", "start_profiler", "stop_profiler"):
        inner = getattr(place.backend, op)

        def noted(*args: Any, inner: Any = inner, op: str = op, **kwargs: Any) -> Any:
            made.append(op)
            return inner(*args, **kwargs)

        monkeypatch.setattr(place.backend, op, noted)
    options = ReplayOptions(ops=["linear"], only=[2], calls=3)
    assert recording.calls[2].op == "linear"
    assert run_replay(recording, "", place, options, ORIGIN) == 0
    # The first is to compile, and not for the profiler.
    assert made == ["linear", "start_profiler", *["linear"] * 3, "stop_profiler"]


def test_one_that_cannot_be_made_does_not_keep_the_others(
    recording: Recording, place: Place, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def wrong(*args: Any, **kwargs: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(place.backend, "silu_and_mul", wrong)
    options = dataclasses.replace(QUICK, ops=["silu_and_mul", "gather_rows"], calls=1)
    silu = sum(call.op == "silu_and_mul" for call in recording.calls)
    assert run_replay(recording, "", place, options, ORIGIN) == silu > 0
    said = capsys.readouterr()
    assert said.err.count("planted") == silu
    assert "gather_rows" in said.out


def test_calls_are_chosen_by_name_and_number(recording: Recording) -> None:
    every = chosen_calls(recording, ReplayOptions())
    assert every == list(range(len(recording.calls)))
    linear = chosen_calls(recording, ReplayOptions(ops=["linear"]))
    assert linear == [i for i in every if recording.calls[i].op == "linear"]
    assert chosen_calls(recording, ReplayOptions(ops=["linear"], only=[0, linear[1]])) == [
        linear[1]
    ]
    with pytest.raises(RecordingError, match="conv"):
        chosen_calls(recording, ReplayOptions(ops=["conv", "linear"]))
    with pytest.raises(RecordingError, match="numbered from 0"):
        chosen_calls(recording, ReplayOptions(only=[0, -1, 10**6]))


def test_what_does_not_fit_memory_is_refused(recording: Recording, place: Place) -> None:
    view = next(view for view in views(recording, place.backend) if view.call.op == "linear")
    shared, stored = operand_bytes(view)
    with pytest.raises(RecordingError, match="GB that may be used"):
        make_calls(view, 4, 0, shared + stored - 1)
    assert len(make_calls(view, 4, 0, shared + stored)) == 1
    assert len(make_calls(view, 4, 0, shared + 3 * stored)) == 3
    assert len(make_calls(view, 4, 0, shared + 9 * stored)) == 4


# The command


def test_the_command_replays_a_file(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("bench.replay_places.measure_peaks", lambda threads: replay_peaks())
    monkeypatch.setattr("bench.op_cases.last_level_cache_bytes", lambda: 2**10)
    path, output = tmp_path / "ops.json", tmp_path / "rows.jsonl"
    write_recording(path, recording)
    given = ["ops", "--replay", str(path), "--ops", "linear", "--threads", "1", "--seconds", "0"]
    assert main([*given, "--dtypes", "bfloat16", "--output", str(output)]) == 0
    rows = read(output)
    assert {row["parameters"]["dtype"] for row in rows} == {"bfloat16"}
    assert rows[0]["parameters"]["recording"] == "ops.json"
    share = rows[0]["results"]["gb_per_s"] * 1e9 / 2e9
    assert rows[0]["results"]["bandwidth_share"] == pytest.approx(share, rel=1e-4)
    output.unlink()
    # The types of the recording, if none is given; nothing is measured for a profiler.
    monkeypatch.setattr("bench.replay_places.measure_peaks", None)
    assert main([*given, "--calls", "2", "--output", str(output)]) == 0
    first = read(output)[0]["parameters"]
    assert (first["dtype"], first["kv_cache_dtype"]) == ("float32", "float32")
    assert "made" in capsys.readouterr().out
    output.unlink()
    other = ["--kv-cache-dtype", "fp8", "--dtypes", "bfloat16", "--output", str(output)]
    attention = [*given[:4], "paged_attention", *given[5:], "--calls", "1", *other]
    assert main(attention) == 0
    row = read(output)[0]
    assert row["parameters"]["kv_cache_dtype"] == "fp8_e4m3"


def replay_peaks() -> Any:
    from bench.probes import Peaks

    return Peaks(2e9, {"multiply_add": 4e9, "bfloat16_dot": 4e9})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "1"], "--only has a meaning with --replay or another --device only"),
        (["--calls", "1"], "--calls has a meaning"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype has a meaning with"),
        (["--replay", "FILE", "--calls", "0"], "--calls 0 must be at least 1"),
        (["--replay", "FILE", "--threads", "2", "0"], "--threads 0 must be at least 1"),
        (["--threads", "-1"], "--threads -1 must be at least 1"),
        (["--device", "simulator", "--rows", "0"], "--rows 0 must be at least 1"),
        (["--contexts", "0"], "--contexts 0 must be at least 1"),
        (["--replay", "FILE", "--rows", "3"], "--rows has a meaning without --replay only"),
        (["--replay", "FILE", "--config", "x"], "--config has a meaning without --replay only"),
        (["--replay", "FILE", "--require-quiet"], "--require-quiet goes with"),
        (["--replay", "FILE", "--only", "999"], "numbered from 0"),
        (["--replay", "FILE", "--ops", "conv"], "were not called"),
        (["--replay", "no-file"], "No such file"),
        (["--device", "simulator", "--threads", "1"], "--threads has a meaning on the CPU only"),
        (["--device", "simulator", "--only", "1"], "--only has a meaning with --replay only"),
        (["--dtypes", "float16"], "not float16"),
    ],
)
def test_flags_that_clash(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("bench.replay_places.measure_peaks", lambda threads: replay_peaks())
    path = tmp_path / "ops.json"
    write_recording(path, recording)
    given = [str(path) if flag == "FILE" else flag for flag in flags]
    assert main(["ops", *given]) == 2
    assert words in capsys.readouterr().err


def test_a_simulator_needs_numbas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.ENABLE_CUDASIM", 0)
    with pytest.raises(BackendError, match="NUMBA_ENABLE_CUDASIM=1"):
        open_place("simulator", dtype="bfloat16", threads=None, measures=False)


# Simulated kernels


@pytest.fixture
def simulated(
    request: pytest.FixtureRequest, cuda_wheels: CudaWheels, numba_cuda: None
) -> Iterator[Place]:
    """With a cache of the parameter's type, or of bfloat16."""
    kv_cache_dtype = getattr(request, "param", None)
    opened = DevicePlace(
        SimulatedTarget(), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, measures=False
    )
    yield opened
    opened.close()


_OVER_CACHES = {"rope_and_store_kv", "paged_attention"}


@pytest.mark.gpusim
@pytest.mark.parametrize(
    ("simulated", "ops"),
    [
        (None, set(RECORDED_OPS) - {"copy_blocks"}),
        ("fp8_e4m3", _OVER_CACHES),
    ],
    indirect=["simulated"],
)
def test_simulated_kernels_give_what_the_cpu_gives(
    llama: Recording, simulated: Place, ops: set[str]
) -> None:
    """From the same seed: operands are the same, and results but for rounding."""
    kv_cache_dtype = simulated.backend.kv_cache_dtype
    cpu = CpuBackend(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, num_threads=1)
    checked = 0
    pairs = zip(views(llama, simulated.backend), views(llama, cpu), strict=True)
    seen: set[tuple[str, str]] = set()
    for ours, theirs in pairs:
        if ours.call.op not in ops or (ours.call.op, ours.label) in seen:
            continue
        seen.add((ours.call.op, ours.label))
        found, expected = outputs(ours, 5), outputs(theirs, 5)
        assert found.keys() == expected.keys()
        for name in found:
            size = max(1.0, float(abs(expected[name]).max()))
            error = abs(found[name] - expected[name]).max()
            assert error <= 2.0**-6 * size, f"{ours.label} {name}: {error=} {size=}"
            checked += 1
    assert {op for op, _ in seen} == ops
    assert checked > len(seen)
    cpu.close()


@pytest.mark.gpusim
def test_a_gpu_engines_steps_are_recorded_without_graphs(
    simulated: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.gpu.test_engine import gpu_engine

    engine = gpu_engine("llama", "bfloat16", enforce_eager=False, batch_invariant=True)
    recorded = record_engine(engine, tmp_path / "ops.json")
    # Both prompts are in every step, with what has been generated of them.
    assert {plan.num_prompt_tokens for plan in recorded.plans} <= {(42,), (42, 3), (3,)}
    decode = [step for step in recorded.steps if "prefill=0" in step.name]
    layers = engine.runner.config.num_layers
    assert decode
    for step in decode:
        made = [recorded.calls[call].op for call in step.calls]
        assert made.count("paged_attention") == layers
    engine.close()
    attention = [i for i, call in enumerate(recorded.calls) if call.op == "paged_attention"]
    options = ReplayOptions(only=[*attention[:1], *attention[-1:]], calls=1)
    assert run_replay(recorded, "", simulated, options, ORIGIN) == 0
    views_of = [CallView(recorded, recorded.calls[i], simulated.backend) for i in attention]
    assert all(used_blocks(view, "cache") <= 40 for view in views_of)


@pytest.mark.gpusim
@pytest.mark.usefixtures("cuda_wheels", "numba_cuda")
def test_a_kernel_that_leaves_its_arrays_is_found(
    llama: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker is at work: a table that names a block beyond the pool is a fault of the call."""
    from tests.hostsim.loader import HostSimError

    simulated = open_place("simulator", dtype="bfloat16", measures=False)
    index = next(i for i, call in enumerate(llama.calls) if call.op == "paged_attention")
    monkeypatch.setattr("bench.replay_operands.used_blocks", lambda view, name: 1)
    with pytest.raises(HostSimError, match="out-of-bounds"):
        run_replay(llama, "", simulated, ReplayOptions(only=[index], calls=1), ORIGIN)
    simulated.close()
