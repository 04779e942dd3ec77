"""How one request wants its tokens chosen: vLLM's SamplingParams, checked on construction."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rawpaged.errors import InvalidRequestError

MAX_STOP_STRINGS = 32
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
"""Each costs every step of the request a little, and the steps are shared with others."""
MAX_N = 128

EarlyStopping = bool | Literal["never"]
"""When a beam search that has its hypotheses ends; see `rawpaged.engine.beam_search`."""

_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


class RequestOutputKind(enum.Enum):
    """What an intermediate RequestOutput holds."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Only one output, when the request has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; names and meanings are vLLM's.

    Raises InvalidRequestError, whose `param` is the field's name. What depends on the model
    (token ids below its vocabulary, lengths) is checked when the request is admitted.
    """

    n: int = 1
    """Number of samples of the one prompt."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the output holds the token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    """None: drawn at random when the request is admitted."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as `max_model_len` leaves."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many output tokens."""
    logprobs: int | None = None
    """Number of most likely tokens reported at each position, besides the chosen one."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_types()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_ranges()
        self._check_stops()
        self._check_logit_bias()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def _check_types(self) -> None:
        """A wrong type would only show in a step, among the requests that share it."""
        for names, kinds, words in (
            (_INTEGERS, (int,), "an integer"),
            (_OPTIONAL_INTEGERS, (int, type(None)), "an integer or None"),
            (_NUMBERS, (int, float), "a number"),
            (_BOOLEANS, (bool,), "true or false"),
            (("stop", "stop_token_ids"), (Sequence, type(None)), "a sequence"),
            (("logit_bias",), (Mapping, type(None)), "a mapping"),
            (("output_kind",), (RequestOutputKind,), "a RequestOutputKind"),
        ):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                    raise InvalidRequestError(f"{name} must be {words}, not {value!r}", name)

    def _check_ranges(self) -> None:
        bounds: tuple[tuple[str, float, float, str], ...] = (
            ("n", 1, MAX_N, f"between 1 and {MAX_N}"),
            ("temperature", 0.0, 100.0, "between 0 and 100"),
            ("top_k", -1, 2**31 - 1, "-1, 0 or a positive integer"),
            ("min_p", 0.0, 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
            ("seed", -(2**63), 2**64 - 1, "a 64-bit integer"),
            ("max_tokens", 1, math.inf, "at least 1"),
            ("min_tokens", 0, math.inf, "at least 0"),
            ("logprobs", 0, math.inf, "at least 0"),
            ("prompt_logprobs", 0, math.inf, "at least 0"),
        )
        for name, low, high, words in bounds:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(f"{name} must be {words}, not {value}", name)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], not {self.top_p}", "top_p")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise InvalidRequestError(
                f"repetition_penalty must be greater than 0, not {self.repetition_penalty}",
                "repetition_penalty",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}",
                "min_tokens",
            )

    def _check_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop holds {len(self.stop_strings)} strings, the limit is {MAX_STOP_STRINGS}",
                "stop",
            )
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids holds {len(self.stop_token_ids or ())} ids, the limit is "
                f"{MAX_STOP_TOKEN_IDS}",
                "stop_token_ids",
            )
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise InvalidRequestError("stop must hold non-empty strings", "stop")

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias or {}) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias holds {len(self.logit_bias or {})} tokens, the limit is "
                f"{MAX_LOGIT_BIASES}",
                "logit_bias",
            )
        for token_id, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, (int, float)) or not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} must be between -100 and 100, not {bias}",
                    "logit_bias",
                )
