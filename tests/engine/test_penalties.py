"""Bias and penalties against a plain reference over the recorded logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.engine.helpers import recorded_logits, request, run, tiny_engine
from tests.tiny import EOS

PROMPT = [5, 9, 9, 17, 200]
STRONG: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.3},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8},
    {"presence_penalty": -1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {9: 0.7, 17: -3.0, 300: 0.4}},
    {"logit_bias": {9: 1.0, 17: 2.0}, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
]


def choose(logits: npt.NDArray[np.float32], output: list[int], params: dict[str, Any]) -> int:
    """The greedy token, by the definitions in the documentation of SamplingParams."""
    scores = logits.astype(np.float64)
    for token_id, bias in params.get("logit_bias", {}).items():
        scores[token_id] += bias
    penalty = params.get("repetition_penalty", 1.0)
    for token_id in {*PROMPT, *output}:
        scores[token_id] *= 1 / penalty if scores[token_id] > 0 else penalty
    for token_id in set(output):
        scores[token_id] -= params.get("presence_penalty", 0.0)
        scores[token_id] -= params.get("frequency_penalty", 0.0) * output.count(token_id)
    return int(scores.argmax())


@pytest.mark.parametrize("params", STRONG, ids=str)
def test_greedy_choice(params: dict[str, Any]) -> None:
    engine = tiny_engine()
    plain = request("plain", PROMPT, max_tokens=40)
    output = run(engine, [request("a", PROMPT, max_tokens=40, **params), plain])
    rows = [np.frombuffer(row, np.float32) for row in recorded_logits(engine)["a"]]
    for count, (row, token_id) in enumerate(zip(rows, output["a"], strict=True)):
        assert token_id == choose(row, output["a"][:count], params)
    assert output["a"] != output["plain"]
    engine.close()


def test_bias_forces_and_forbids() -> None:
    engine = tiny_engine()
    plain = run(engine, [request("plain", PROMPT)])["plain"]
    forced = run(engine, [request("forced", PROMPT, logit_bias={33: 100.0}, temperature=1.0)])
    assert forced["forced"] == [33] * 16
    forbidden = {token_id: -100.0 for token_id in plain}
    without = run(engine, [request("without", PROMPT, logit_bias=forbidden)])["without"]
    assert not set(without) & set(plain)
    engine.close()


def test_min_tokens_wins_over_bias_for_the_end() -> None:
    engine = tiny_engine()
    each = request("a", PROMPT, logit_bias={EOS: 100.0}, ignore_eos=False, min_tokens=3)
    each.eos_token_ids = frozenset({EOS})
    output = run(engine, [each])["a"]
    assert EOS not in output[:3]
    assert output[3:] == [EOS]
    engine.close()
