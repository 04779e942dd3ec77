"""`bench perplexity`: the numbers on made-up log-probabilities, and the way from text to rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.perplexity import compared, engine_fields
from bench.run import main


def test_perplexity_is_that_of_the_text_and_its_ratio_that_of_both() -> None:
    results = compared(np.log([0.5, 0.25, 0.125]), np.log([0.5, 0.5, 0.25]))
    assert results["perplexity"] == pytest.approx((2 * 4 * 8) ** (1 / 3))
    assert results["perplexity_ratio"] == pytest.approx(4 ** (1 / 3))
    assert results["mean_logprob_error"] == pytest.approx(2 * math.log(2) / 3)
    assert results["max_logprob_error"] == pytest.approx(math.log(2))


def test_variants_are_fields_of_the_engine() -> None:
    assert engine_fields("dtype=bfloat16") == {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match="field of EngineConfig"):
        engine_fields("dtype")
    with pytest.raises(ValueError, match="field of EngineConfig"):
        engine_fields("dtype=float32,colour=red")
    with pytest.raises(ValueError, match="--model says which model"):
        engine_fields("model=m")


@pytest.mark.model
def test_rows_of_a_short_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    output = tmp_path / "rows.jsonl"
    arguments = ["perplexity", "--text", str(text), "--window", "16", "--output", str(output)]
    assert main(arguments) == 0
    exact, rounded = (json.loads(line) for line in output.read_text().splitlines())
    assert exact["case"] == "dtype=float32"
    assert exact["results"]["perplexity_ratio"] == 1
    assert exact["results"]["max_logprob_error"] == 0
    assert 2 < exact["results"]["perplexity"] < 100
    # 41 tokens; the first of each window of 16 has no prediction.
    assert exact["results"]["tokens"] == 38
    assert rounded["results"]["perplexity_ratio"] == pytest.approx(1, abs=0.02)
    assert 0 < rounded["results"]["max_logprob_error"] < 0.2
    assert "perplexity" in capsys.readouterr().out


def test_what_it_cannot_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", "--variants", "colour=red"]) == 2
    assert main(["perplexity", "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    assert main(["perplexity", "--window", "1"]) == 2
    assert "--window 1 must be at least 2" in capsys.readouterr().err
    assert main(["perplexity", "--variants", "max_num_seqs=4"]) == 2
    assert "max_num_seqs='4' must be an integer" in capsys.readouterr().err


@pytest.mark.model
def test_a_text_without_a_second_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "empty.txt"
    text.write_text("")
    assert main(["perplexity", "--text", str(text)]) == 2
    assert "empty.txt has no second token to ask for" in capsys.readouterr().err
