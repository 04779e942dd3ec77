"""CUMULATIVE, DELTA and FINAL_ONLY outputs tell the same, for random parameters."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rawpaged import AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.outputs import CompletionOutput, RequestOutput
from tests.tiny import VOCAB_SIZE

PROMPTS = ("the", "naïve 日", [5, 200, 230, 140])
STOPS = ("e", "th", " t", "\ufffd", "\ufffd\ufffd", "日", "é", "s the")


def random_params(rng: random.Random) -> SamplingParams:
    """Sampling over all tokens, so that text holds whole, split and broken characters."""
    optional: dict[str, Any] = {
        "stop": rng.sample(STOPS, rng.randint(1, 3)),
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), 20),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "min_tokens": rng.randint(1, 10),
        "logprobs": rng.randint(0, 3),
        "prompt_logprobs": rng.randint(0, 2),
        "frequency_penalty": 0.5,
        "temperature": 0.0,
        "ignore_eos": True,
        "logit_bias": {token_id: 4.0 for token_id in (138, 199, 232, 259, 260, 261)},
    }
    chosen = {name: value for name, value in optional.items() if rng.random() < 0.4}
    return SamplingParams(
        seed=rng.randrange(1000),
        max_tokens=rng.randint(10, 40),
        n=rng.choice([1, 1, 2, 3]),
        **chosen,
    )


async def collect(
    engine: AsyncEngine, prompt: str | list[int], params: SamplingParams, kind: RequestOutputKind
) -> list[RequestOutput]:
    stream = engine.generate(prompt, replace(params, output_kind=kind))
    outputs = [output async for output in stream]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def joined(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    """One CompletionOutput a sample, made of its deltas."""
    samples: dict[int, CompletionOutput] = {}
    for output in outputs:
        for news in output.outputs:
            so_far = samples.get(news.index)
            if so_far is None:
                samples[news.index] = news
                continue
            assert so_far.finish_reason is None
            samples[news.index] = replace(
                news,
                text=so_far.text + news.text,
                token_ids=so_far.token_ids + news.token_ids,
                logprobs=None if news.logprobs is None else (so_far.logprobs or []) + news.logprobs,
            )
    return [samples[index] for index in sorted(samples)]


def check_growth(outputs: list[RequestOutput]) -> None:
    """Cumulative text and tokens are only ever extended."""
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids


@pytest.mark.parametrize("seed", range(60))
def test_kinds_agree(async_engine: AsyncEngine, seed: int) -> None:
    rng = random.Random(seed)
    prompt, params = rng.choice(PROMPTS), random_params(rng)

    async def main() -> list[list[RequestOutput]]:
        return [await collect(async_engine, prompt, params, kind) for kind in RequestOutputKind]

    cumulative, delta, final = asyncio.run(main())
    assert len(final) == 1
    assert len(final[0].outputs) == params.n
    assert cumulative[-1].outputs == final[0].outputs
    assert joined(delta) == final[0].outputs
    check_growth(cumulative)
    for sample in final[0].outputs:
        assert len(sample.logprobs or sample.token_ids) == len(sample.token_ids)
    assert cumulative[-1].prompt_logprobs == final[0].prompt_logprobs
    assert delta[0].prompt_logprobs == final[0].prompt_logprobs
    assert all(output.prompt_logprobs is None for output in delta[1:])


def test_the_random_cases_are_varied(async_engine: AsyncEngine) -> None:
    """Some end by stop string, stop token and length; some hold multi-byte and broken text."""

    async def main() -> list[CompletionOutput]:
        samples = []
        for seed in range(60):
            rng = random.Random(seed)
            prompt, params = rng.choice(PROMPTS), random_params(rng)
            (output,) = await collect(async_engine, prompt, params, RequestOutputKind.FINAL_ONLY)
            samples += output.outputs
        return samples

    samples = asyncio.run(main())
    for kind in (str, int, type(None)):
        assert sum(isinstance(sample.stop_reason, kind) for sample in samples) > 5
    assert sum("\ufffd" in sample.text for sample in samples) > 5
    assert sum(not sample.text.replace("\ufffd", "").isascii() for sample in samples) > 5
