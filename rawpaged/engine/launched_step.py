"""A step between the launch of its forward pass and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rawpaged.engine.sampler import PositionLogprobs, SampledToken, Sampling
from rawpaged.request import Request


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, by request id."""

    sampled: Mapping[str, SampledToken]
    prompt_logprobs: Mapping[str, Mapping[int, PositionLogprobs]]
    """For requests that asked: prompt position -> log-probabilities of the token there."""


@dataclass(slots=True)
class LaunchedStep:
    """A step whose forward pass is launched, and whose sampling may be."""

    sampling_requests: list[Request]
    """Those that sample, by row of logits."""
    logits: Any = None  # f32[len(sampling_requests), vocab_size]; valid until the next forward pass
    prompt_logprobs: Mapping[str, Mapping[int, PositionLogprobs]] = field(default_factory=dict)
    sampling: Sampling | None = None
    wait: Callable[[], None] | None = None
    """Where nothing is sampled, but the step is not over when it has been launched."""

    def tokens(self) -> list[SampledToken]:
        """Those that were sampled, by row; waits for the step."""
        if self.sampling is not None:
            return self.sampling.wait()
        if self.wait is not None:
            self.wait()
        return []
