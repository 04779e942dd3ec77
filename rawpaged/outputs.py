"""What a request gives back, shaped as vLLM's RequestOutput."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token before temperature and penalties."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    decoded_token: str
    """The token's text on its own; bytes of a split character show as U+FFFD."""


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob of one position: the chosen token first, then the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a request; text and lists hold everything or the news, by `output_kind`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the chosen tokens' logprobs so far; None unless `logprobs` or beam search was asked
    for."""
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    """"stop", "length", "abort" or "error"; None while the sample goes on."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; None for the end-of-sequence token."""
    beam_score: float | None = None
    """With beam search: cumulative_logprob / number of tokens ** length_penalty."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """State of one request; `finished` is true exactly once, on the last one.

    In DELTA mode `outputs` lists the samples that have news.
    """

    request_id: str
    prompt: str | None
    """None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    """One entry a prompt token, the first None; on the first output only in DELTA mode."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
