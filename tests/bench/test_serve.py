"""`bench serve` from the command line to its rows."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.run import main
from bench.server_process import ServerFailedError, is_healthy, started_server
from tests.bench import fake_server
from tests.bench.fake_server import FakeServer, running


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serve.busy_share", lambda: 0.01)


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_for_each_case_with_medians_over_repetitions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results" / "rows.jsonl"
    with running(FakeServer()) as server:
        arguments = ["serve", "--url", server.url, "--preset", "a", "e", "--repeat", "2"]
        arguments += ["--label", "fake", "--api-key", "sesame", "--output", str(output)]
        assert main(arguments) == 0
    rows = read_rows(output)
    assert [row["case"] for row in rows] == ["a", "e"]
    for row in rows:
        assert row["benchmark"] == "serve"
        assert row["parameters"]["model"] == "fake"
        assert row["load_before"] == 0.01
        assert row["other_cores"] is None
        assert row["server_ready_seconds"] is None
        assert len(row["runs"]) == 2
        assert row["results"]["errors"] == 0
    assert rows[1]["results"]["prompt_tokens"] == 12_800
    assert "sesame" not in output.read_text()
    printed = capsys.readouterr().out
    assert "out tok/s" in printed
    assert printed.count("fake") == 2


def test_no_prompt_is_sent_twice_over_cases_repetitions_and_warm_up() -> None:
    with running(FakeServer()) as server:
        for _ in range(2):
            main(["serve", "--url", server.url, "--preset", "a", "b", "--repeat", "2"])
    # (1 warm-up + 2 x 4) and (8 warm-up + 2 x 32), by two runs with seeds of their own.
    assert len(server.bodies) == 2 * (9 + 72)
    prompts = {tuple(body["prompt"][:8]) for body in server.bodies}
    assert len(prompts) == len(server.bodies)


def test_a_seed_repeats_the_prompts() -> None:
    with running(FakeServer()) as server:
        for _ in range(2):
            main(["serve", "--url", server.url, "--preset", "a", "--seed", "5"])
    half = len(server.bodies) // 2
    assert server.bodies[:half] == server.bodies[half:]


def test_errors_of_any_repetition_are_in_the_sum_and_in_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    with running(FakeServer(failures={3: "status"})) as server:
        arguments = ["serve", "--url", server.url, "--num-requests", "2", "--output-len", "2"]
        arguments += ["--repeat", "3", "--warm-up-requests", "0", "--output", str(output)]
        assert main(arguments) == 1
    [row] = read_rows(output)
    assert row["case"] == "custom"
    assert row["results"]["errors"] == 1
    assert row["results"]["requests"] == 2
    assert [run["errors"] for run in row["runs"]] == [0, 1, 0]
    assert row["results"]["error_messages"] == row["runs"][1]["error_messages"]
    assert "HTTP 500" in capsys.readouterr().err


def test_an_open_loop_has_no_concurrency(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with running(FakeServer()) as server:
        arguments = ["serve", "--url", server.url, "--request-rate", "200", "--num-requests", "4"]
        arguments += ["--prompt-format", "text", "--output", str(output)]
        assert main(arguments) == 0
        assert main([*arguments, "--concurrency", "2"]) == 2
    [row] = read_rows(output)
    assert row["parameters"]["concurrency"] is None
    assert row["parameters"]["request_rate"] == 200
    assert isinstance(server.bodies[-1]["prompt"], str)


def test_a_server_is_started_waited_for_and_stopped(tmp_path: Path, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    output = tmp_path / "rows.jsonl"
    command = f"{sys.executable} {fake_server.__file__} {port}"
    arguments = ["serve", "--url", url, "--preset", "a", "--server-command", command]
    assert main([*arguments, "--output", str(output)]) == 0
    [row] = read_rows(output)
    assert row["server_ready_seconds"] > 0
    assert row["other_cores"] is not None
    assert not is_healthy(url)


def test_a_server_that_ends_at_once(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{sys.executable} {fake_server.__file__} {port} 3"
    url = f"http://127.0.0.1:{port}"
    assert main(["serve", "--url", url, "--server-command", command]) == 2
    assert "ended with 3" in capsys.readouterr().err


def test_a_server_that_does_not_answer_in_time(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(60)'"
    with (
        pytest.raises(ServerFailedError, match="in time"),
        started_server(command, f"http://127.0.0.1:{port}/", timeout=0.3),
    ):
        pass
    assert f"waiting for http://127.0.0.1:{port}/health" in capsys.readouterr().err


def test_a_command_that_does_not_exist(port: int) -> None:
    with (
        pytest.raises(ServerFailedError, match="cannot start"),
        started_server("no-such-server", f"http://127.0.0.1:{port}", timeout=1),
    ):
        pass


def test_no_server_is_started_where_one_answers() -> None:
    with (
        running(FakeServer()) as server,
        pytest.raises(ServerFailedError, match="already"),
        started_server("no-such-server", server.url, timeout=1),
    ):
        pass


def test_a_url_where_nothing_answers(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--url", f"http://127.0.0.1:{port}"]) == 2
    assert "error: " in capsys.readouterr().err


def test_rows_tell_where_the_processors_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the case, between its repetitions, and after it."""
    numbers = iter(range(100))
    monkeypatch.setattr("bench.serve.measure_handover", lambda: next(numbers))
    output = tmp_path / "rows.jsonl"
    with running(FakeServer()) as server:
        arguments = ["serve", "--url", server.url, "--preset", "a", "--output", str(output)]
        assert main([*arguments, "--repeat", "2"]) == 0
    [row] = read_rows(output)
    assert row["handover_ns"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--num-requests", "8"), ("--shared-prefix-len", "0"), ("--request-rate", "2")],
)
def test_a_preset_is_a_whole_case(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--preset", "a", flag, value]) == 2
    assert f"{flag} is part of a case, which --preset chooses" in capsys.readouterr().err


def test_a_busy_machine_is_warned_of_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.serve.busy_share", lambda: 0.7)
    output = tmp_path / "rows.jsonl"
    with running(FakeServer()) as server:
        arguments = ["serve", "--url", server.url, "--preset", "a", "--output", str(output)]
        assert main(arguments) == 0
        assert main([*arguments, "--require-quiet"]) == 2
    [row] = read_rows(output)
    assert row["load_before"] == 0.7
    assert "70% busy" in capsys.readouterr().err
