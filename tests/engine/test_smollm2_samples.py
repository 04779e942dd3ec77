"""Samples of a long prompt on a real model: the prompt is held once, and texts are as alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine.engine import Engine
from rawpaged.request import RequestGroup
from tests.engine.helpers import request, samples
from tests.tiny import engine_of

BLOCK_SIZE = 16
PROMPT_LEN = 1000
MAX_TOKENS = 40

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    flags = {"max_model_len": 1100, "num_gpu_blocks_override": 400, "enable_prefix_caching": False}
    with LLM("smollm2-135m", **flags) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(llm: LLM) -> Engine:
    """Driven by the test: its own thread sleeps while nothing is submitted."""
    return engine_of(llm)


@pytest.fixture(scope="module")
def prompt(llm: LLM) -> list[int]:
    assert llm.tokenizer is not None
    text = "A block table says where each token of a request is. Nothing else has to know. "
    return (llm.tokenizer.encode(text) * 100)[:PROMPT_LEN]


def run(engine: Engine, group: RequestGroup) -> tuple[list[list[int]], int]:
    """Output token ids of each request, and the most blocks in use after any step."""
    requests = list(group.requests)
    engine.add_group(group)
    peak = 0
    while engine.has_unfinished():
        engine.step()
        peak = max(peak, engine.scheduler.num_used_blocks)
        engine.scheduler.check_integrity()
    assert engine.scheduler.num_used_blocks == 0
    return [each.output_token_ids for each in requests], peak


@pytest.mark.parametrize("n", [2, 4])
def test_the_prompt_is_held_once(engine: Engine, prompt: list[int], n: int) -> None:
    """Full blocks of the prompt once, the rest of each sample by itself; and as many tokens."""
    params: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": 11}
    num_before = engine.scheduler.num_prompt_tokens
    outputs, peak = run(engine, samples("a", n, prompt, **params)[0].group)
    assert engine.scheduler.num_prompt_tokens == num_before + PROMPT_LEN
    # The last token is sampled and never stored.
    num_blocks = -(-(PROMPT_LEN + MAX_TOKENS - 1) // BLOCK_SIZE)
    num_shared = PROMPT_LEN // BLOCK_SIZE
    theory = num_shared + n * (num_blocks - num_shared)
    assert theory - n <= peak <= theory
    alone = []
    for index in range(n):
        single = request("b", prompt, **{**params, "seed": 11 + index})
        (output,), used = run(engine, single.group)
        alone.append(output)
        assert used == num_blocks
    assert outputs == alone
    assert len({tuple(output) for output in outputs}) == n


def test_through_the_public_interface(llm: LLM, prompt: list[int]) -> None:
    """Sample i is what a single request with seed + i says; all are equal however often asked."""
    params = SamplingParams(n=4, max_tokens=MAX_TOKENS, seed=11, temperature=0.8, ignore_eos=True)
    first, again = llm.generate([prompt, prompt], params, use_tqdm=False)
    singles = llm.generate(
        [prompt] * 4,
        [replace(params, n=1, seed=11 + index) for index in range(4)],
        use_tqdm=False,
    )
    assert first.outputs == again.outputs
    assert [sample.text for sample in first.outputs] == [
        single.outputs[0].text for single in singles
    ]
    assert len({sample.text for sample in first.outputs}) == 4
