"""`bench breakdown`: the clock, and a tiny server under load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.breakdown import BETWEEN, KERNELS, PARTS, RECORDING, PartsClock
from bench.presets import PRESETS
from bench.run import main
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.engine.engine import Engine
from rawpaged.errors import ConfigError
from tests.tiny import LLAMA, write_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The tiny Llama with a tokenizer."""
    return str(write_tokenizer(Path(shutil.copytree(LLAMA, tmp_path / "model"))))


class Hands:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def work(self, seconds: float, *inside: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self.time += seconds
            for function in inside:
                function()

        return run


def test_a_part_has_not_what_is_inside_it() -> None:
    hands = Hands()
    clock = PartsClock(hands)
    kernels = clock.timed(hands.work(5), KERNELS)
    schedule = clock.timed(hands.work(0.5), "scheduler")
    step = clock.timed(hands.work(1, schedule, kernels, hands.work(0.25), kernels), "rest of step")
    output = clock.timed(hands.work(2), "output")
    output()  # before the first step nothing counts
    for _ in range(2):
        step()
        output()
        hands.time += 0.125
    assert clock.num_steps == 2
    assert clock.wall == 2 * (1 + 0.5 + 5 + 0.25 + 5 + 2) + 0.125
    seconds = {part: share * clock.wall for part, share in clock.shares().items()}
    expected = {KERNELS: 20, "scheduler": 1, "rest of step": 2.5, "output": 4, BETWEEN: 0.125}
    assert seconds == pytest.approx(dict.fromkeys(PARTS, 0) | expected)
    clock.reset()
    step()
    assert clock.wall == 11.75


def test_calls_that_are_only_recorded_are_no_kernels() -> None:
    hands = Hands()
    clock = PartsClock(hands)
    record = clock.timed(hands.work(1, clock.timed(hands.work(3), KERNELS)), RECORDING)
    clock.timed(record, "rest of step")()
    assert clock.seconds[RECORDING] == 4
    assert clock.seconds[KERNELS] == 0


def test_parts_of_a_server_under_load(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, size in (("a", 1), ("b", 3)):
        case = replace(PRESETS[name], num_requests=4, concurrency=size, prompt_len=9, output_len=5)
        monkeypatch.setitem(PRESETS, name, case)
    untouched = ThreadTeam.replay, Engine.step
    output = tmp_path / "rows.jsonl"
    arguments = ["breakdown", "--model", model]
    arguments += ["--preset", "a", "b", "--token-ids", "3:300", "--threads", "2"]
    assert main([*arguments, "--output", str(output)]) == 0
    assert (ThreadTeam.replay, Engine.step) == untouched
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["a", "b"]
    for row in rows:
        results = row["results"]
        assert results["errors"] == 0
        assert sum(results["shares"].values()) == pytest.approx(1, abs=1e-4)
        assert all(share >= 0 for share in results["shares"].values())
        # What is recorded is recorded by the load before.
        assert all(results["shares"][part] > 0 for part in PARTS if part != RECORDING)
        assert results["http_cpu_share"] > 0
    # One request after the other: a step for each of its tokens.
    assert rows[0]["results"]["steps"] == 4 * 5
    assert rows[1]["results"]["steps"] < 4 * 5
    assert "outside kernels" in capsys.readouterr().out


def test_a_server_that_does_not_come_up(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*args: object, **options: object) -> None:
        raise ConfigError("no address is left")

    monkeypatch.setattr("bench.breakdown.serve_forever", fail)
    assert main(["breakdown", "--model", model, "--preset", "a", "--threads", "1"]) == 2
    assert capsys.readouterr().err.endswith("error: no address is left\n")


def test_a_load_that_cannot_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["breakdown", "--model", model]
    assert main([*arguments, "--preset", "a", "--token-ids", "9:3", "--threads", "1"]) == 2
    assert "9:3" in capsys.readouterr().err
