"""SmolLM2-135M-Instruct against what transformers computed from the same GGUF in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

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
