"""SmolLM2-135M-Instruct against what transformers computed from the same GGUF in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from bench.perplexity import PerplexityOptions, text_logprobs
from rawpaged import LLM, SamplingParams
from tests.conftest import GOLDEN

ORACLE = json.loads((GOLDEN / "smollm2-135m.json").read_text())
TOKENS = 48

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "smollm2-135m",
        dtype="float32",
        num_gpu_blocks_override=256,
        max_model_len=1024,
        max_num_batched_tokens=64,
    ) as opened:
        yield opened


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, skip_special_tokens=False, **params
    )


def test_completions(llm: LLM) -> None:
    """All at once, in one ragged batch: ids, text, top-5 and prompt log-probabilities."""
    cases = ORACLE["completions"]
    outputs = llm.generate(
        [case["prompt"] for case in cases], greedy(logprobs=5, prompt_logprobs=0), use_tqdm=False
    )
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        (sample,) = output.outputs
        assert sample.token_ids == case["greedy"]
        assert sample.text == case["greedy_text"]
        assert sample.logprobs is not None
        for position, top in zip(sample.logprobs, case["top5_logprobs"], strict=True):
            for token_id, logprob in top:
                assert position[token_id].logprob == pytest.approx(logprob, abs=1e-3)
        assert output.prompt_logprobs is not None
        for i, expected in enumerate(case["prompt_logprobs"]):
            got = output.prompt_logprobs[i]
            if expected is None:
                assert got is None
            else:
                assert got is not None
                token = got[case["prompt_ids"][i]]
                assert token.logprob == pytest.approx(expected, abs=1e-3)


def test_chats(llm: LLM) -> None:
    cases = ORACLE["chats"]
    outputs = llm.chat([case["messages"] for case in cases], greedy(), use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["greedy"]
        assert output.outputs[0].text == case["greedy_text"]


def test_quantised_as_it_is_stored() -> None:
    """The default: log-probabilities near the dequantised model's, all and on average."""
    cases = ORACLE["completions"]
    differences = []
    with LLM("smollm2-135m", max_model_len=1024, num_gpu_blocks_override=256) as llm:
        outputs = llm.generate(
            [case["prompt"] for case in cases],
            SamplingParams(max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.prompt_logprobs is not None
        for i, expected in enumerate(case["prompt_logprobs"][1:], 1):
            got = output.prompt_logprobs[i]
            assert got is not None
            differences.append(abs(got[case["prompt_ids"][i]].logprob - expected))
    assert 1e-3 < sum(differences) / len(differences) < 0.1
    assert max(differences) < 0.8


REFERENCE_PERPLEXITY = 24.18813
"""Of bench/texts/alice.txt in windows of 512 with dtype=float32: `bench perplexity`, 2026-11-29."""


def test_perplexity_of_the_default() -> None:
    """Within half a percent of the dequantised model's in float32."""
    options = PerplexityOptions(model="smollm2-135m", variants=[])
    logprobs = text_logprobs(options, {"dtype": "auto"})
    assert len(logprobs) == 1539
    assert math.exp(-logprobs.mean()) == pytest.approx(REFERENCE_PERPLEXITY, rel=0.005)
