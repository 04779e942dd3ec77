"""What the engine says of a request."""

from __future__ import annotations

from typing import NamedTuple

from rawpaged.engine.beam_groups import BeamOutput
from rawpaged.engine.sampler import PositionLogprobs
from rawpaged.request import FinishReason


class EngineOutput(NamedTuple):
    """What one step brought one request; `finish_reason` on its last."""

    request_id: str
    token_id: int | None
    """None when the request ended without a new token."""
    logprobs: PositionLogprobs | None
    prompt_logprobs: list[PositionLogprobs | None] | None
    """Complete, with the first token, if they were asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int
    error: str | None = None
    beams: tuple[BeamOutput, ...] | None = None
    """What a beam search has found; then this is the output of all requests of its group, which
    have ended, under the name of the first."""
