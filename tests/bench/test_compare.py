"""`bench.compare` from the command line to its rows and tables."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from bench.compare import main, rate_name
from bench.limits import least_seconds, work_of_model
from bench.presets import PRESETS
from bench.probes import Peaks, Product
from tests.bench import fake_server
from tests.bench.fake_server import FakeServer, running
from tests.tiny import LLAMA

RATES: dict[Product, float] = {"multiply_add": 3e9, "bfloat16_dot": 6e9, "byte_dot": 12e9}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serve.busy_share", lambda: 0.01)
    monkeypatch.setattr("bench.serve._IDLE_SECONDS", 0.01)


def test_servers_take_turns_and_get_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    with running(FakeServer()) as fast, running(FakeServer(gap=0.002)) as slow:
        arguments = ["--peers", "slow", "--ours", "fast", "--preset", "a", "--repeat", "2"]
        arguments += ["--url", f"fast={fast.url}", "--url", f"slow={slow.url}"]
        assert main([*arguments, "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["benchmark"] for row in rows] == ["serve"] * 4 + ["compare"]
    labels = [row["parameters"]["label"] for row in rows[:4]]
    assert labels == ["fast", "slow", "fast", "slow"]
    assert [body["prompt"] for body in fast.bodies] == [body["prompt"] for body in slow.bodies]
    results = rows[-1]["results"]
    rates = [row["results"]["output_tokens_per_s"] for row in rows[:4]]
    assert results["medians"]["fast"] == pytest.approx((rates[0] + rates[2]) / 2, rel=1e-4)
    assert results["ratios"]["slow"] == pytest.approx(
        (rates[0] + rates[2]) / (rates[1] + rates[3]), rel=1e-4
    )
    assert results["ratios"]["slow"] > 1.5
    printed = capsys.readouterr().out
    assert "x slow" in printed


def test_a_server_that_it_starts_is_weighed_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "rows.jsonl"
    with running(FakeServer()) as ours:
        arguments = ["--peers", "peer", "--preset", "a", "--repeat", "1"]
        arguments += ["--url", f"rawpaged={ours.url}", "--url", f"peer=http://127.0.0.1:{port}"]
        arguments += ["--command", f"peer={sys.executable} {fake_server.__file__} {port}"]
        assert main([*arguments, "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows[0]["server_rss_bytes"] is None
    assert 5e6 < rows[1]["server_rss_bytes"] < 5e9
    assert 0 <= rows[1]["server_idle_cores"] < 2
    table = capsys.readouterr().out.splitlines()
    assert table[-2].split()[:2] == ["rawpaged", "-"]
    assert float(table[-1].split()[1]) > 0


def test_limits_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = iter([Peaks(2e9, RATES | {"multiply_add": 1e9}), Peaks(1e9, RATES)])
    monkeypatch.setattr("bench.compare.measure_peaks", lambda num_threads: next(peaks))
    output = tmp_path / "rows.jsonl"
    with running(FakeServer()) as ours, running(FakeServer()) as peer:
        arguments = ["--peers", "peer", "--preset", "a", "d", "--repeat", "2"]
        arguments += ["--url", f"rawpaged={ours.url}", "--url", f"peer={peer.url}"]
        arguments += ["--limits", f"{LLAMA}:float32", "--output", str(output)]
        assert main(arguments) == 0
    row_a, row_d = [json.loads(line) for line in output.read_text().splitlines()][-2:]
    work = work_of_model(LLAMA, "float32")
    best = Peaks(2e9, RATES)
    seconds = [least_seconds(work, PRESETS[name], best) for name in "ad"]
    assert row_a["results"]["limit"] == pytest.approx(4 * 128 / seconds[0], rel=1e-4)
    assert row_d["results"]["limit"] == pytest.approx(6 * 1025 / seconds[1], rel=1e-4)
    assert row_a["peaks"]["read_gb_per_s"] == 2.0
    assert "% of it" in capsys.readouterr().out


def test_limits_of_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--peers", "peer", "--url", "peer=http://127.0.0.1:9", "--limits", "./none"]
    assert main(arguments) == 2
    assert "./none: there is no such file" in capsys.readouterr().err


def test_errors_show_in_the_exit_status() -> None:
    with running(FakeServer()) as good, running(FakeServer(failures={2: "status"})) as bad:
        arguments = ["--peers", "bad", "--preset", "a", "--repeat", "1"]
        arguments += ["--url", f"rawpaged={good.url}", "--url", f"bad={bad.url}"]
        assert main(arguments) == 1


def test_a_server_that_fails_altogether_has_no_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    failures = dict.fromkeys(range(100), "status")
    with running(FakeServer()) as good, running(FakeServer(failures=failures)) as bad:
        arguments = ["--peers", "bad", "--preset", "a", "--repeat", "1", "--output", str(output)]
        arguments += ["--url", f"rawpaged={good.url}", "--url", f"bad={bad.url}"]
        assert main(arguments) == 1
    results = json.loads(output.read_text().splitlines()[-1])["results"]
    assert results["medians"]["bad"] == 0
    assert results["ratios"] == {"bad": None}
    assert "x bad" in capsys.readouterr().out


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--peers", "gone", "--url", "rawpaged=http://127.0.0.1:9"]
    assert main([*arguments, "--url", "gone=http://127.0.0.1:9"]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm"], "say where vllm answers"),
        (["--peers", "vllm,vllm"], "not distinct names"),
        (["--peers", "rawpaged"], "not distinct names"),
        (["--peers", "vllm", "--url", "vlm=http://127.0.0.1:1"], "with a NAME of"),
        (["--peers", "vllm", "--url", "http://127.0.0.1:1"], "with a NAME of"),
        (["--peers", "vllm", "--url", "vllm=x", "--repeat", "0"], "must be at least 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_case_is_judged_by_the_tokens_it_is_about() -> None:
    rates = {name: rate_name(case) for name, case in PRESETS.items()}
    decode, prefill = "output_tokens_per_s", "total_tokens_per_s"
    assert rates == {"a": decode, "b": decode, "c": decode, "d": prefill, "e": prefill}
