"""`bench ops`: formulas, and that wrong results are found before anything is timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench import ops
from bench.attention_cases import attention_flops, make_batch
from bench.op_cases import SMOLLM2_135M, OpCase, quantized_cases
from bench.ops import OpsOptions, make_cases, summarize
from bench.probes import (
    CHAINS,
    Peaks,
    Product,
    _read,
    chain_kernel,
    known_products,
    lanes_of,
    measure_peaks,
)
from bench.run import main
from bench.timing import Timing, time_calls, time_recorded
from rawpaged.cpu.backend import CpuBackend
from rawpaged.cpu.block_types import BLOCK_TYPES
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.weights.checkpoint import read_model_config
from tests.conftest import TINY

CONFIG = str(TINY / "llama" / "config.json")
OPTIONS = OpsOptions(config=CONFIG, rows=(1, 20), contexts=(33,))


PEAKS = Peaks(1e9, {"multiply_add": 1e10, "bfloat16_dot": 2e10, "byte_dot": 4e10})


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of 64 KB, so that few copies are made; no probes and no waiting."""
    monkeypatch.setattr("bench.op_cases.last_level_cache_bytes", lambda: 2**16)
    monkeypatch.setattr(ops, "measure_peaks", lambda num_threads: PEAKS)
    monkeypatch.setattr(ops, "busy_share", lambda: 0.0)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    opened = CpuBackend(dtype=request.param, num_threads=2)
    yield opened
    opened.close()


def cases(dtype: str) -> list[OpCase]:
    return make_cases(read_model_config(CONFIG), OPTIONS, dtype)


def test_all_cases_are_right_and_run(backend: CpuBackend) -> None:
    for case in cases(backend.dtype):
        prepared = case.prepare(backend, np.random.default_rng(0))
        prepared.check()
        for call in prepared.calls[:3]:
            call()
        prepared.calls[-1]()


def test_every_op_of_the_backend_has_a_case() -> None:
    no_ops = {"empty", "upload", "download", "pack_linear", "pack_quantized"}
    no_ops |= {"kv_bytes_per_block", "new_kv_cache"}
    no_ops |= {"kv_magnitudes", "new_host_kv_cache", "offload_linear", "restore_linear"}
    no_ops |= {"release_unused", "bind_thread", "linear_input"}
    no_ops |= {"memory_info", "close", "plan", "static_plans", "run_ahead", "capture", "prepare"}
    no_ops |= {"pages_ahead"}
    no_ops |= {"start_profiler", "stop_profiler"}
    names = {name for name, value in vars(CpuBackend).items() if callable(value)}
    names = {name for name in names if not name.startswith("_")}
    assert {case.op for case in cases("float32")} == names - no_ops


def test_what_comes_from_memory_is_in_more_copies_than_the_caches_hold(
    backend: CpuBackend,
) -> None:
    checked = 0
    for case in cases(backend.dtype):
        if case.op == "linear" or case.name == "decode":
            calls = case.prepare(backend, np.random.default_rng(0)).calls
            # The bytes of the case have activations among them: 16 to 20 rows of a few hundred.
            assert len(calls) * case.num_bytes >= 4 * 2**16
            checked += 1
    assert checked == 12


@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 9), (5, 5), (3, 8)])
def test_attention_flops_count_visible_keys(queries: int, context: int) -> None:
    visible = sum(context - queries + 1 + i for i in range(queries))
    assert attention_flops(2, 16, queries, context) == visible * 2 * 2 * 2 * 16


def test_bytes_and_flops_of_a_linear_layer() -> None:
    model = read_model_config(CONFIG)
    [case] = [case for case in cases("bfloat16") if (case.name, case.rows) == ("down_proj", 20)]
    inputs, outputs = model.intermediate_size, model.hidden_size
    assert case.num_bytes == 2 * inputs * outputs + 4 * 20 * (inputs + outputs)
    assert case.num_flops == 2 * 20 * inputs * outputs


def test_a_batch_of_chunks_at_the_end_of_their_contexts() -> None:
    tables = np.array([[4, 2, 9], [0, 7, 1]], np.int32)
    meta = make_batch(tables, 3, 34)
    assert meta.positions.tolist() == [31, 32, 33] * 2
    assert meta.slot_mapping.tolist() == [47, 144, 145, 127, 16, 17]
    assert meta.query_start_loc.tolist() == [0, 3, 6]
    assert meta.seq_lens.tolist() == [34, 34]


def test_rates_are_at_the_median_and_shares_of_the_peaks() -> None:
    case = OpCase(
        op="x", name="y", rows=1, num_bytes=1000, num_flops=4000, prepare=lambda *_: NotImplemented
    )
    timing = Timing(7, median=2e-6, best=1e-6, p95=3e-6)
    results = summarize(case, timing, Peaks(1e9, {"multiply_add": 8e9}))
    assert results.pop("product") == "multiply_add"
    assert results == pytest.approx(
        {
            "calls": 7,
            "median_us": 2.0,
            "min_us": 1.0,
            "p95_us": 3.0,
            "bytes": 1000,
            "flops": 4000,
            "gb_per_s": 0.5,
            "gflop_per_s": 2.0,
            "read_peak_share": 0.5,
            "flop_peak_share": 0.25,
        }
    )


def test_calls_are_timed_in_turn() -> None:
    seen: list[int] = []

    def call(index: int) -> None:
        seen.append(index)
        time.sleep(0.002)

    timing = time_calls([lambda i=i: call(i) for i in range(4)], seconds=0.02)  # type: ignore[misc]
    warm_up, timed = seen[:3], seen[3:]
    assert warm_up == [0, 1, 2]
    assert timed == [i % 4 for i in range(len(timed))]
    assert 5 <= timing.calls == len(timed) <= 10
    assert 0.002 <= timing.best <= timing.median <= timing.p95


def test_recorded_calls_are_repeated_in_turn() -> None:
    seen: list[int] = []

    def capture(forward: Callable[[], None]) -> Callable[[], None]:
        before = len(seen)
        forward()
        recorded = seen[before:]
        del seen[before:]

        def repeat() -> None:
            seen.extend(recorded)
            time.sleep(0.001 * len(recorded))

        return repeat

    def call(index: int) -> None:
        seen.append(index)
        time.sleep(0.0002)

    calls = [lambda i=i: call(i) for i in range(7)]
    timing = time_recorded(capture, calls, seconds=0.03)
    # Each call takes 0.2 ms and more, so that a recording has two or three.
    repeated = seen[3 + 5 :]
    assert repeated[:4] == [0, 1, 2, 3]
    assert set(repeated) == set(range(7))
    assert timing.calls >= 10
    assert 0.001 <= timing.best <= timing.median <= timing.p95 < 0.01


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    output = tmp_path / "rows.jsonl"
    given = ["ops", "--config", CONFIG, "--rows", "1", "20", "--contexts", "33", "--threads", "2"]
    status = main([*given, "--seconds", "0.001", "--output", str(output), *arguments])
    return status, [json.loads(line) for line in output.read_text().splitlines()]


def test_rows_are_sorted_by_op_and_types_that_do_not_matter_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path, "--ops", "rms_norm", "paged_attention")
    assert status == 0
    assert [(row["case"], row["parameters"]["dtype"]) for row in rows] == [
        *[("paged_attention/decode", "bfloat16")] * 2,
        ("paged_attention/prefill", "bfloat16"),
        *[("rms_norm/rms_norm", "float32")] * 2,
        *[("paged_attention/decode", "float32")] * 2,
        ("paged_attention/prefill", "float32"),
    ]
    assert rows[0]["peaks"] == {
        "read_gb_per_s": 1.0,
        "multiply_add_gflop_per_s": 10.0,
        "bfloat16_dot_gflop_per_s": 20.0,
        "byte_dot_gflop_per_s": 40.0,
    }
    assert rows[0]["results"]["calls"] >= 5
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[2:]] == ["paged_attention"] * 6 + ["rms_norm"] * 2


def test_a_wrong_op_is_reported_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = CpuBackend.silu_and_mul

    def wrong(self: CpuBackend, out: Any, gate_up: Any) -> None:
        right(self, out, gate_up)
        out[-1, -1] += 1e-3

    monkeypatch.setattr(CpuBackend, "silu_and_mul", wrong)
    status, rows = run(tmp_path, "--ops", "silu_and_mul", "gather_rows")
    assert status == 1
    results = {row["case"]: row["results"] for row in rows}
    assert results["gather_rows/gather_rows"]["refcheck"] == "passed"
    assert set(results["silu_and_mul/silu_and_mul"]) == {"refcheck"}
    assert "Not equal" in results["silu_and_mul/silu_and_mul"]["refcheck"]
    assert "WRONG" in capsys.readouterr().out


def test_rows_tell_where_the_processors_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a case is timed and after it."""
    numbers = iter(range(100))
    monkeypatch.setattr("bench.ops.measure_handover", lambda: next(numbers))
    _, rows = run(tmp_path, "--ops", "gather_rows")
    expected = [[2 * i, 2 * i + 1] for i in range(len(rows))]
    assert [row["handover_ns"] for row in rows] == expected != []


def test_an_op_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--config", CONFIG, "--ops", "conv"]) == 2
    assert "conv" in capsys.readouterr().err


def test_probes_measure_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.probes._CHAIN_LENGTH", 20_000)
    peaks = measure_peaks(1)
    assert peaks.read_bytes_per_s > 0
    assert list(peaks.flops_per_s) == known_products()
    assert min(peaks.flops_per_s.values()) > 0


def test_the_probe_of_bandwidth_reads_it_all() -> None:
    team, total = ThreadTeam(1), np.zeros(1, np.uint64)
    team.run(_read, 999, np.arange(1000, dtype=np.uint64), total)
    team.close()
    assert total[0] == 998 * 999 // 2


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("product", known_products())
def test_the_probe_of_products_does_them_all(count: int, product: Product) -> None:
    lanes = lanes_of(product)
    pair = np.array([1.5, 2], ml_dtypes.bfloat16).view(np.uint32)[0]
    one = {"multiply_add": np.float32(3), "bfloat16_dot": pair, "byte_dot": np.uint32(0x01020304)}
    dot = {"bfloat16_dot": 1.5**2 + 2**2, "byte_dot": 1 + 4 + 9 + 16}
    buffers = np.ones((1, CHAINS + 2, lanes), np.float32)
    buffers[0, :2] = np.array(one[product]).view(np.float32)
    start: float = 1
    if product == "byte_dot":
        buffers[0, 2:] = np.array(1, np.int32).view(np.float32)
    for _ in range(count):
        start = start * 3 + 3 if product == "multiply_add" else start + dot[product]
    team = ThreadTeam(1)
    team.run(chain_kernel(product), 1, buffers, count)
    team.close()
    sums = buffers[0, 2:]
    assert ((sums.view(np.int32) if product == "byte_dot" else sums) == start).all()


@pytest.mark.parametrize("type_name", list(BLOCK_TYPES))
def test_weights_in_blocks(type_name: str) -> None:
    model = replace(SMOLLM2_135M, hidden_size=256, intermediate_size=288, vocab_size=70)
    made = quantized_cases(model, 3, type_name)
    # Blocks of 256 do not divide 288 and 576.
    assert len(made) == (3 if BLOCK_TYPES[type_name].is_k_type else 5)
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    for case in made:
        prepared = case.prepare(backend, np.random.default_rng(0))
        prepared.check()
        prepared.calls[-1]()
    backend.close()


def test_types_of_blocks_are_measured_on_the_cpu_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path, "--ops", "linear", "--dtypes", "Q8_0")
    assert status == 0
    assert {row["parameters"]["dtype"] for row in rows} == {"Q8_0"}
    assert main(["ops", "--device", "simulator", "--dtypes", "Q4_0"]) == 2
    assert "--dtypes Q4_0 is for the CPU's own cases only" in capsys.readouterr().err
