"""Synthetic lengths have the moments that they are said to have."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import pytest

from bench.capacity.lengths import ALPACA, SHAREGPT, Dataset, LengthDistribution, RequestSize


@pytest.mark.parametrize(
    ("dataset", "prompt_mean", "output_mean"), [(SHAREGPT, 161, 338), (ALPACA, 19, 58)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_published_means(
    dataset: Dataset, prompt_mean: float, output_mean: float, seed: int
) -> None:
    sizes = dataset.draw(1500, seed)
    prompts = [size.prompt_len for size in sizes]
    outputs = [size.output_len for size in sizes]
    assert fmean(prompts) == pytest.approx(prompt_mean, rel=0.01)
    assert fmean(outputs) == pytest.approx(output_mean, rel=0.01)
    assert pstdev(prompts) / fmean(prompts) == pytest.approx(dataset.prompt.cv, rel=0.02)
    assert pstdev(outputs) / fmean(outputs) == pytest.approx(dataset.output.cv, rel=0.02)
    assert min(prompts) >= 1
    assert min(outputs) >= 1
    assert max(size.prompt_len + size.output_len for size in sizes) <= 2048


def test_equal_seeds_give_equal_sizes() -> None:
    assert SHAREGPT.draw(200, 3) == SHAREGPT.draw(200, 3)
    assert SHAREGPT.draw(200, 3) != SHAREGPT.draw(200, 4)
    assert sorted(s.prompt_len for s in SHAREGPT.draw(200, 3)) == sorted(
        s.prompt_len for s in SHAREGPT.draw(200, 4)
    )


def test_first_lengths_stay_as_they_are() -> None:
    """Whoever changes what is drawn has to make docs/capacity.md anew."""
    first = [(size.prompt_len, size.output_len) for size in SHAREGPT.draw(1500, 0)[:4]]
    assert first == [(137, 75), (115, 110), (19, 284), (52, 885)]


def test_kv_of_the_last_token_is_not_stored() -> None:
    assert RequestSize(30, 10).num_kv_tokens == 39


@pytest.mark.parametrize(
    ("mean", "cv", "longest"), [(338, 0.88, 1536), (19, 0.7, 256), (2, 0.05, 100), (500, 0.5, 1024)]
)
def test_moments_against_a_sum_over_many_draws(mean: float, cv: float, longest: int) -> None:
    lengths = LengthDistribution(mean, cv, longest).draw(20_000, random.Random(0))
    assert fmean(lengths) == pytest.approx(mean, rel=0.005)
    # Rounding to whole tokens adds a twelfth to the variance.
    variance = (cv * mean) ** 2 + (1 / 12 if cv * mean > 1 else 0)
    if cv * mean > 1:
        assert pstdev(lengths) == pytest.approx(variance**0.5, rel=0.01)


@pytest.mark.parametrize(("mean", "cv", "longest"), [(0.5, 1, 10), (10, 1, 10), (10, 0, 20)])
def test_what_cannot_be(mean: float, cv: float, longest: int) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        LengthDistribution(mean, cv, longest)


def test_too_wide_a_spread_is_refused() -> None:
    with pytest.raises(ValueError, match="cv=3 is too wide for mean=19 below 256"):
        LengthDistribution(19, 3, 256).draw(1, random.Random(0))


def test_pairs_that_are_too_long_are_refused_where_none_fits() -> None:
    prompts, outputs = LengthDistribution(90, 0.01, 100), LengthDistribution(50, 0.1, 99)
    dataset = Dataset("long", prompts, outputs, 99)
    with pytest.raises(ValueError, match="no output goes with a prompt of"):
        dataset.draw(10, 0)
