"""One sample on its way from token ids to its user: text, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from rawpaged.engine.beam_groups import BeamOutput
from rawpaged.engine.sampler import PositionLogprobs
from rawpaged.outputs import CompletionOutput, Logprob, TokenLogprobs
from rawpaged.request import FinishReason
from rawpaged.sampling_params import SamplingParams
from rawpaged.tokenization.detokenizer import IncrementalDetokenizer
from rawpaged.tokenization.stop_strings import StopStringMatcher
from rawpaged.tokenization.tokenizer import Tokenizer


class SampleOutput:
    """A sample's text and tokens so far; `finish_reason` is set once it has ended."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        """Sum over the tokens whose log-probabilities were given."""
        self._beam_score: float | None = None
        self._stop_reason: int | str | None = None
        self._sent_text = 0
        self._sent_tokens = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.incremental(
                prompt_token_ids=prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
        self._matcher = StopStringMatcher(params.stop_strings, params.include_stop_str_in_output)

    def add_token(self, token_id: int, *, hide_text: bool) -> str | None:
        """Extend the text; returns the stop string that ended it, if one did."""
        self._token_ids.append(token_id)
        if self._detokenizer is None or hide_text:
            return None
        piece = self._detokenizer.append(token_id)
        if len(self._token_ids) <= self._params.min_tokens or not self._params.stop_strings:
            self._text += piece
            return None
        shown, stop = self._matcher.feed(piece)
        self._text += shown
        return stop

    def add_logprobs(self, entry: PositionLogprobs) -> None:
        """Keep those of a token, if its user wants any, and add its own up."""
        self.cumulative_logprob += entry.logprobs[0]
        if self._logprobs is not None:
            self._logprobs.append(named_logprobs(entry, self._tokenizer))

    def add_beam(self, beam: BeamOutput) -> None:
        """Become a sequence that a beam search has found, and end."""
        hypothesis = beam.hypothesis
        # As of a sample: the token that ended it is not part of the text, unless asked for.
        hides_last = hypothesis.is_ended and not self._params.include_stop_str_in_output
        last = len(hypothesis.tokens) - 1
        for place, token in enumerate(hypothesis.tokens):
            self.add_token(token.token_id, hide_text=hides_last and place == last)
            if token.candidates is not None:
                best = token.candidates
                self.add_logprobs(
                    PositionLogprobs(
                        token_ids=(token.token_id, *best.token_ids),
                        logprobs=(token.logprob, *best.logprobs),
                        ranks=(token.rank, *range(1, len(best.token_ids) + 1)),
                    )
                )
        self.cumulative_logprob = hypothesis.cumulative_logprob
        self._beam_score = hypothesis.score
        self.end(beam.finish_reason, beam.stop_reason)

    def end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Set the reason and let out what was held back, unless a stop string ended the text."""
        if self._detokenizer is not None and not isinstance(stop_reason, str):
            rest, stop = self._matcher.feed(self._detokenizer.finish())
            self._text += rest
            if stop is None:
                self._text += self._matcher.finish()
            else:
                reason, stop_reason = FinishReason.STOP, stop
        self.finish_reason = reason
        self._stop_reason = stop_reason

    def completion(self, *, delta: bool) -> CompletionOutput:
        """All there is so far, or what is new since the last call."""
        first_char, first_token = (self._sent_text, self._sent_tokens) if delta else (0, 0)
        has_sum = self._logprobs is not None or self._beam_score is not None
        output = CompletionOutput(
            index=self.index,
            text=self._text[first_char:],
            token_ids=self._token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob if has_sum else None,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
            beam_score=self._beam_score,
        )
        self._sent_text, self._sent_tokens = len(self._text), len(self._token_ids)
        return output


def named_logprobs(entry: PositionLogprobs, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """By token id, the chosen one first and with its own rank, which ties may set apart."""
    named: TokenLogprobs = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
        if token_id not in named:
            text = "" if tokenizer is None else tokenizer.token_text(token_id)
            named[token_id] = Logprob(logprob, rank, text)
    return named
