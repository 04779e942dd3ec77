"""Log-probabilities of the engine in the two shapes that the OpenAI API has for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rawpaged.outputs import CompletionOutput, Logprob, TokenLogprobs
from rawpaged.server.responses import (
    ChatChoice,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; vLLM sends the same number."""


class CompletionLogprobsWriter:
    """Collects the legacy lists; offsets count characters of token texts from `text_offset` on."""

    def __init__(self, *, text_offset: int, tokens_as_ids: bool) -> None:
        self.logprobs = CompletionLogprobs([], [], [], [])
        self.text_offset = text_offset
        self._tokens_as_ids = tokens_as_ids

    def add_first_prompt_token(self, token_id: int, text: str) -> None:
        """The first token follows nothing, so it has no probability."""
        self._add(token_id, text, None, None)

    def add(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs]) -> None:
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = position[token_id]
            top: dict[str, float] = {}
            for top_id, entry in position.items():
                name = _token_name(top_id, entry.decoded_token, self._tokens_as_ids)
                # Different tokens may have one text (pieces of a character): the likelier stays.
                top[name] = max(top.get(name, LOWEST_LOGPROB), entry.logprob)
            self._add(token_id, chosen.decoded_token, _finite(chosen.logprob), top)

    def _add(
        self, token_id: int, text: str, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        logprobs = self.logprobs
        logprobs.text_offset.append(self.text_offset)
        logprobs.token_logprobs.append(logprob)
        logprobs.tokens.append(_token_name(token_id, text, self._tokens_as_ids))
        logprobs.top_logprobs.append(top)
        self.text_offset += len(text)


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    *,
    num_top: int,
    tokens_as_ids: bool,
) -> ChatLogprobs:
    """One entry a token; `top_logprobs` holds exactly the `num_top` most likely, best first."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        chosen = _top_logprob(token_id, position[token_id], tokens_as_ids)
        content.append(
            ChatTokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[_top_logprob(*item, tokens_as_ids) for item in top],
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's shape: a dict by token id for each prompt token, null for the first."""
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(_finite(entry.logprob), entry.rank, entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def add_beam_scores(choice: CompletionChoice | ChatChoice, sample: CompletionOutput) -> None:
    """What a beam search found the sample to be worth; other samples have no scores."""
    if sample.beam_score is None or sample.cumulative_logprob is None:
        return
    # Sums, and sums times a power of the length, may well be below LOWEST_LOGPROB.
    for name in ("cumulative_logprob", "beam_score"):
        value = getattr(sample, name)
        setattr(choice, name, value if math.isfinite(value) else LOWEST_LOGPROB)


def _top_logprob(token_id: int, entry: Logprob, tokens_as_ids: bool) -> TopLogprob:
    text = entry.decoded_token
    return TopLogprob(
        token=_token_name(token_id, text, tokens_as_ids),
        logprob=_finite(entry.logprob),
        bytes=list(text.encode()),
    )


def _token_name(token_id: int, text: str, tokens_as_ids: bool) -> str:
    return f"token_id:{token_id}" if tokens_as_ids else text


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
