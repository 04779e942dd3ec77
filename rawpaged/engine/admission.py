"""Checks one request against the model and its limits before it is queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rawpaged.config import SchedulerConfig
from rawpaged.errors import InvalidRequestError, count_of
from rawpaged.models.config import ModelConfig
from rawpaged.sampling_params import MAX_BEAM_CANDIDATES, SamplingParams
from rawpaged.scheduler.limits import check_lockstep, check_priority
from rawpaged.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything a request has to fit; all checks raise InvalidRequestError naming the field."""

    model_config: ModelConfig
    tokenizer: Tokenizer | None
    max_model_len: int
    max_logprobs: int
    scheduler_config: SchedulerConfig

    def prompt_token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, special tokens added to text as its tokenizer wants."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "the model has no tokenizer; give the prompt as token ids", "prompt"
                )
            self.check_length(prompt, "prompt")
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = _as_list(prompt)
            self._check_token_ids(token_ids, "prompt")
        if not token_ids:
            raise InvalidRequestError("prompt holds no tokens", "prompt")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; with at least one token of output that "
                f"is more than max_model_len={self.max_model_len}",
                "prompt",
            )
        return token_ids

    def check_length(self, text: str, name: str) -> None:
        """Refuse text that cannot fit, without spending the time to tokenize it."""
        assert self.tokenizer is not None
        most = self.tokenizer.most_characters(self.max_model_len)
        if len(text) > most:
            raise InvalidRequestError(
                f"{name} has {len(text)} characters; max_model_len={self.max_model_len} tokens "
                f"are {most} at most",
                name,
            )

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most output tokens: what was asked, or all that is left."""
        left = self.max_model_len - num_prompt_tokens
        if params.max_tokens is None:
            return left
        if params.max_tokens > left:
            raise InvalidRequestError(
                f"{count_of(num_prompt_tokens, 'prompt token')} and "
                f"max_tokens={params.max_tokens} are more than max_model_len={self.max_model_len}; "
                f"max_tokens may be {left} at most",
                "max_tokens",
            )
        return params.max_tokens

    def check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """What SamplingParams cannot check without the model."""
        check_priority(params.priority, self.scheduler_config)
        self._check_token_ids(params.logit_bias or (), "logit_bias")
        self._check_token_ids(params.stop_token_ids or (), "stop_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > min(self.max_logprobs, self.model_config.vocab_size):
                raise InvalidRequestError(
                    f"{name}={value} is more than max_logprobs={self.max_logprobs}", name
                )
        if params.use_beam_search:
            self._check_beams(params, num_prompt_tokens)
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequestError("stop needs a tokenizer, the model has none", "stop")
        if params.min_tokens > self.max_tokens(num_prompt_tokens, params):
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} does not fit max_model_len={self.max_model_len}",
                "min_tokens",
            )

    def _check_beams(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Beams have to run together, and each to give candidates enough.

        They are enough if `n` are left where all stop tokens are among them.
        """
        check_lockstep(
            params.n,
            num_prompt_tokens,
            self.max_tokens(num_prompt_tokens, params),
            self.scheduler_config,
        )
        stops = {*(params.stop_token_ids or ()), *self.model_config.eos_token_ids}
        most = min(MAX_BEAM_CANDIDATES, self.model_config.vocab_size)
        if params.n + len(stops) > most:
            raise InvalidRequestError(
                f"n={params.n} beams and {len(stops)} stop tokens are more than {most} together, "
                "the most candidates that a beam can have",
                "n",
            )

    def _check_token_ids(self, token_ids: Iterable[int], name: str) -> None:
        vocab_size = self.model_config.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(f"{name} holds {token_id!r}, not a token id", name)
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name} holds token id {token_id}; ids go from 0 to {vocab_size - 1}", name
                )


def _as_list(prompt: object) -> list[int]:
    """The elements of a sequence, not looked at yet."""
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"prompt must be text or a list of token ids, not {prompt!r}", "prompt"
        )
    return list(prompt)
