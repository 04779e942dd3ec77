"""Beam search of SmolLM2-135M-Instruct against transformers', ten prompts at widths 2, 4, 8."""

from __future__ import annotations

import json

import pytest

from rawpaged import LLM, SamplingParams
from tests.conftest import GOLDEN

CASES = [
    case
    for case in json.loads((GOLDEN / "beam_search.json").read_text())["cases"]
    if case["model"] == "smollm2-135m"
]

pytestmark = pytest.mark.model


def test_golden_searches() -> None:
    """All at once, each with its own width and rules; the sums are told too."""
    assert len({tuple(case["prompt_ids"]) for case in CASES}) == 10
    assert {case["width"] for case in CASES} == {2, 4, 8}
    names = ("max_tokens", "stop_token_ids", "length_penalty", "early_stopping")
    params = [
        SamplingParams(
            use_beam_search=True,
            n=case["width"],
            temperature=0.0,
            ignore_eos=True,
            **{name: case[name] for name in names},
        )
        for case in CASES
    ]
    with LLM(
        "smollm2-135m",
        dtype="float32",
        num_gpu_blocks_override=256,
        max_model_len=128,
        max_num_batched_tokens=64,
    ) as llm:
        outputs = llm.generate([case["prompt_ids"] for case in CASES], params, use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        told = [sample.token_ids for sample in output.outputs]
        assert told == [beam["token_ids"] for beam in case["beams"]], case["margin"]
        for sample, beam in zip(output.outputs, case["beams"], strict=True):
            assert sample.beam_score == pytest.approx(beam["score"], rel=1e-4)
            assert sample.cumulative_logprob is not None
            length = len(sample.token_ids) ** case["length_penalty"]
            assert sample.beam_score == pytest.approx(sample.cumulative_logprob / length)
