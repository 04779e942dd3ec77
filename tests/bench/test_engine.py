"""`bench engine` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.run import main
from tests.conftest import TINY


def test_a_row_for_each_batch_size_and_one_for_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.engine.busy_share", lambda: 0.0)
    output = tmp_path / "rows.jsonl"
    arguments = ["engine", "--model", str(TINY / "llama"), "--batch-sizes", "1", "3"]
    arguments += ["--prompt-len", "20", "--output-len", "4", "--prefill-len", "50"]
    arguments += ["--repeat", "2", "--threads", "2", "--output", str(output)]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["batch-1", "batch-3", "prefill"]
    assert [row["results"]["prompt_tokens"] for row in rows] == [20, 60, 50]
    assert [row["results"]["output_tokens"] for row in rows] == [4, 12, 1]
    for row in rows:
        assert row["results"]["cached_tokens"] == 0
        assert row["parameters"]["threads"] == 2
        assert row["parameters"]["seed"] is not None
        assert row["engine_ready_seconds"] > 0
        assert len(row["runs"]) == 2
        run = row["runs"][0]
        total = run["prompt_tokens"] + run["output_tokens"]
        assert run["total_tokens_per_s"] == pytest.approx(total / run["duration_s"], rel=1e-4)
    assert "prompt tok/s" in capsys.readouterr().out


def test_a_model_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--model", str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err
