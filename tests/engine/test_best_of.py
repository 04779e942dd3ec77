"""best_of: many samples are drawn, the likeliest are returned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rawpaged import LLM, AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.errors import InvalidRequestError
from rawpaged.outputs import CompletionOutput, RequestOutput
from tests.tiny import tiny_config

PROMPT = [5, 6, 7, 8]
DRAWN = SamplingParams(n=6, max_tokens=8, seed=3, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_config()) as llm:
        yield llm


def outputs(llm: LLM, params: SamplingParams) -> list[CompletionOutput]:
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return output.outputs


def ranked(samples: list[CompletionOutput]) -> list[CompletionOutput]:
    """By the sum of the log-probabilities that are shown."""

    def total(sample: CompletionOutput) -> float:
        assert sample.logprobs is not None
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        return sum(position[token_id].logprob for token_id, position in pairs)

    return sorted(samples, key=total, reverse=True)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_the_likeliest_of_all_samples(llm: LLM, n: int) -> None:
    samples = outputs(llm, DRAWN)
    best = outputs(llm, replace(DRAWN, n=n, best_of=6))
    expected = samples if n == 6 else ranked(samples)[:n]
    assert best == [replace(sample, index=index) for index, sample in enumerate(expected)]
    assert n == 6 or best != samples[:n]


def test_log_probabilities_are_not_shown_unasked(llm: LLM) -> None:
    (expected, *_) = ranked(outputs(llm, DRAWN))
    (best,) = outputs(llm, replace(DRAWN, n=1, best_of=6, logprobs=None))
    assert best == replace(expected, index=0, logprobs=None, cumulative_logprob=None)


def test_samples_of_different_lengths(llm: LLM) -> None:
    """A sum, not a mean: what ends early tends to be likelier."""
    free = replace(DRAWN, ignore_eos=False, stop_token_ids=range(0, 320, 9), max_tokens=30)
    samples = outputs(llm, free)
    assert len({len(sample.token_ids) for sample in samples}) > 1
    best = outputs(llm, replace(free, n=2, best_of=6))
    assert [sample.token_ids for sample in best] == [
        sample.token_ids for sample in ranked(samples)[:2]
    ]


def test_only_the_end_is_sent() -> None:
    async def main(engine: AsyncEngine) -> list[RequestOutput]:
        params = replace(DRAWN, n=2, best_of=6, output_kind=RequestOutputKind.CUMULATIVE)
        return [output async for output in engine.generate(PROMPT, params)]

    with AsyncEngine(tiny_config()) as engine:
        (output,) = asyncio.run(main(engine))
    assert output.finished
    assert [sample.index for sample in output.outputs] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"n": 3, "best_of": 2}, "best_of=2 is less than n=3"),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "shows at the end"),
        ({"n": 2, "best_of": 2, "use_beam_search": True}, "best_of=2 does not go with"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        SamplingParams(**fields)
    assert caught.value.param == "best_of"


def test_as_many_as_are_returned_may_be_streamed() -> None:
    SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.DELTA)
