"""Prompts share what they are said to share and nothing else; arrivals are a Poisson process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.presets import PRESETS, ServeCase
from bench.prompts import arrival_times, make_prompts

CASE = ServeCase(
    name="case", num_requests=40, concurrency=4, prompt_len=64, output_len=8, shared_prefix_len=48
)


def ids(case: ServeCase, seed: int, count: int | None = None) -> list[list[int]]:
    prompts = make_prompts(
        case,
        np.random.default_rng(seed),
        prompt_format="ids",
        token_ids=(1000, 30000),
        count=count,
    )
    assert all(isinstance(prompt, list) for prompt in prompts)
    return prompts  # type: ignore[return-value]


def test_all_prompts_begin_with_the_shared_prefix_and_differ_right_after_it() -> None:
    prompts = ids(CASE, 0)
    assert [len(prompt) for prompt in prompts] == [64] * 40
    assert len({tuple(prompt[:48]) for prompt in prompts}) == 1
    assert len({tuple(prompt[48:52]) for prompt in prompts}) == 40


def test_nothing_is_shared_without_a_prefix() -> None:
    prompts = ids(replace(CASE, shared_prefix_len=0), 0)
    # Half of the smallest block that servers share is already different everywhere.
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 40


def test_another_seed_has_another_prefix() -> None:
    assert ids(CASE, 0)[0][:8] != ids(CASE, 1)[0][:8]
    assert ids(CASE, 0) == ids(CASE, 0)


def test_ids_stay_in_their_range_and_are_plain_integers() -> None:
    prompts = make_prompts(
        CASE, np.random.default_rng(0), prompt_format="ids", token_ids=(5, 7), count=3
    )
    assert len(prompts) == 3
    tokens = [token for prompt in prompts for token in prompt]
    assert set(tokens) == {5, 6}
    assert all(type(token) is int for token in tokens)


def test_text_has_a_word_a_token_and_a_prefix_of_words() -> None:
    prompts = make_prompts(CASE, np.random.default_rng(0), prompt_format="text", token_ids=(0, 1))
    words = [str(prompt).split() for prompt in prompts]
    assert [len(each) for each in words] == [64] * 40
    assert len({tuple(each[:48]) for each in words}) == 1
    assert len({tuple(each[48:]) for each in words}) == 40


def test_a_closed_loop_waits_for_no_time() -> None:
    assert arrival_times(CASE, np.random.default_rng(0)) == [0.0] * 40


def test_gaps_of_an_open_loop_are_exponential() -> None:
    case = replace(CASE, num_requests=20_000, concurrency=None, request_rate=4.0)
    times = arrival_times(case, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert (gaps >= 0).all()
    # Mean and standard deviation of an exponential distribution are equal.
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)


@pytest.mark.parametrize(
    "change",
    [
        {"num_requests": 0},
        {"concurrency": 0},
        {"prompt_len": 0},
        {"output_len": -1},
        {"shared_prefix_len": 65},
        {"shared_prefix_len": -1},
        {"concurrency": None},
        {"request_rate": 1.0},
        {"concurrency": None, "request_rate": 0.0},
    ],
    ids=str,
)
def test_cases_that_cannot_be(change: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match=r"must be|has either"):
        replace(CASE, **change)  # type: ignore[arg-type]


def test_presets_go_by_their_names() -> None:
    assert list(PRESETS) == ["a", "b", "c", "d", "e"]
    assert all(case.name == name for name, case in PRESETS.items())
    # Twelve thousand eight hundred prompt tokens, of which all but the first sight can be shared.
    shared = PRESETS["e"]
    assert shared.num_requests * shared.prompt_len == 12_800
