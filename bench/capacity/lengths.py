"""Lengths of requests: synthetic ones with published means, and traces that a user gives.

The synthetic ones are lognormal, cut off at a longest length, with prompt and output independent of
each other. Their means are those of the PagedAttention paper (arXiv 2309.06180, figure 11); their
spread is not published, and docs/capacity.md says where it comes from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_WIDEST_SIGMA = 6.0
_EXCHANGES = 1000


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens of a prompt, and of what is generated for it; both at least 1."""

    prompt_len: int
    output_len: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV is stored when it ends: nothing ever reads that of the last one."""
        return self.prompt_len + self.output_len - 1


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lognormal over (0, longest], rounded to whole tokens, at least 1.

    Raises ValueError for a mean or a spread that such a distribution cannot have.
    """

    mean: float
    cv: float
    """Standard deviation over mean."""
    longest: int

    def __post_init__(self) -> None:
        if not (1 <= self.mean < self.longest and self.cv > 0):
            raise ValueError(f"mean={self.mean} cv={self.cv} longest={self.longest} cannot be")

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """`count` lengths, one from each of as many equally likely ranges, in random order.

        Stratified, so that the sample's mean and spread are those asked for whatever the seed.
        """
        mu, sigma = self._fit()
        below = _NORMAL.cdf((math.log(self.longest) - mu) / sigma)
        lengths = []
        for index in range(count):
            quantile = _NORMAL.inv_cdf((index + 0.5) / count * below)
            length = round(math.exp(mu + sigma * quantile))
            lengths.append(min(max(1, length), self.longest))
        rng.shuffle(lengths)
        return lengths

    def _fit(self) -> tuple[float, float]:
        """mu and sigma of the logarithm before the cut, for mean and cv after it."""

        def too_wide(sigma: float) -> bool:
            mu = self._mu_of(sigma)
            second = self._moment(2, mu, sigma)
            return second > self.mean**2 * (1 + self.cv**2)

        sigma = _bisect(too_wide, 0.01, _WIDEST_SIGMA)
        if sigma > 0.99 * _WIDEST_SIGMA:
            raise ValueError(f"cv={self.cv} is too wide for mean={self.mean} below {self.longest}")
        return self._mu_of(sigma), sigma

    def _mu_of(self, sigma: float) -> float:
        top = math.log(self.longest) + 10 * sigma * sigma + 10
        return _bisect(lambda mu: self._moment(1, mu, sigma) > self.mean, -top, top)

    def _moment(self, order: int, mu: float, sigma: float) -> float:
        """E[X ** order] of the distribution that is cut off."""
        cut = (math.log(self.longest) - mu) / sigma
        whole = order * mu + (order * sigma) ** 2 / 2
        kept = _log_cdf(cut - order * sigma) - _log_cdf(cut)
        return math.exp(min(whole + kept, 700.0))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where sizes of requests come from."""

    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    longest: int
    """Tokens of prompt and output together, at most."""

    def draw(self, count: int, seed: int) -> list[RequestSize]:
        """The same sizes for the same seed."""
        rng = random.Random(f"{self.name} {seed}")
        prompts = self.prompt.draw(count, rng)
        outputs = self.output.draw(count, rng)
        self._part_long_ones(prompts, outputs, rng)
        return [RequestSize(*lengths) for lengths in zip(prompts, outputs, strict=True)]

    def _part_long_ones(self, prompts: list[int], outputs: list[int], rng: random.Random) -> None:
        """Exchanges outputs until no pair is too long, so that both distributions stay whole."""
        for index, prompt in enumerate(prompts):
            for _ in range(_EXCHANGES):
                if prompt + outputs[index] <= self.longest:
                    break
                other = rng.randrange(len(prompts))
                if prompts[other] + outputs[index] <= self.longest:
                    outputs[index], outputs[other] = outputs[other], outputs[index]
            else:
                raise ValueError(f"no output goes with a prompt of {prompt} in {self.longest}")


SHAREGPT = Dataset(
    "ShareGPT",
    LengthDistribution(161, 1.2, 1024),
    LengthDistribution(338, 0.88, 1536),
    2048,
)
ALPACA = Dataset(
    "Alpaca",
    LengthDistribution(19, 0.7, 256),
    LengthDistribution(58, 1.0, 1024),
    2048,
)


def _bisect(is_above: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        if is_above(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _log_cdf(x: float) -> float:
    """log of the normal distribution function, also far out on the left where that is 0."""
    if x > -30:
        return math.log(0.5 * math.erfc(-x / math.sqrt(2)))
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi))
