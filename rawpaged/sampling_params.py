"""How one request wants its tokens chosen: vLLM's SamplingParams, checked on construction."""

from __future__ import annotations

import enum
import json
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
MAX_CACHE_SALT = 1024
"""Characters, which are hashed for every block."""

MAX_BEAM_CANDIDATES = 256
"""Beams and stop tokens of a beam search together: so many likeliest tokens each beam chooses from.
To find 1024 of 49,152 takes a CPU ten times as long as 256 (6.5 ms, one thread)."""
MAX_LENGTH_PENALTY = 10.0
"""Of beam search, up or down: powers of any length stay finite."""

EarlyStopping = bool | Literal["never"]
"""When a beam search that has its hypotheses ends; see `rawpaged.engine.beam_search`."""

_INTEGERS = ("n", "top_k", "min_tokens", "priority")
_OPTIONAL_INTEGERS = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
_BOOLEANS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "skip_reading_prefix_cache",
    "use_beam_search",
)


class RequestOutputKind(enum.Enum):
    """What an intermediate RequestOutput holds."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Only one output, when the request has ended."""


_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[object, ...]] = {
    "best_of": (None,),
    "temperature": (1.0, 0.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "stop": ((),),
    "output_kind": (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY),
}
"""Fields that do not go with beam search, and their values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request, and how it is served beside others.

    Names and meanings are vLLM's, which takes `priority` and `cache_salt` elsewhere.

    Raises InvalidRequestError, whose `param` is the field's name. What depends on the model
    (token ids below its vocabulary, lengths) is checked when the request is admitted.
    """

    n: int = 1
    """Number of samples of the one prompt, or of beams."""
    best_of: int | None = None
    """Draw so many and return the `n` likeliest, best first, by the sum of their tokens'
    log-probabilities; only the final output is sent. None: `n`."""
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
    """None: drawn at random when the request is admitted. Sample i of n is drawn with seed + i."""
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
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, though others may find its blocks later."""
    cache_salt: str | None = None
    """KV blocks are shared only with requests of the same salt; samples of one prompt always do."""
    priority: int = 0
    """Lower values are served first, with the scheduling policy "priority"."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    use_beam_search: bool = False
    """Search `n` likely outputs together instead of drawing `n`; only the final output is sent.

    Nothing is drawn and probabilities are the model's own: fields that would change them are
    refused, and so are stop strings; end-of-sequence tokens and stop_token_ids end a beam.
    """
    length_penalty: float = 1.0
    """With beam search: an output of m tokens scores its log-probability / m ** length_penalty."""
    early_stopping: EarlyStopping = False
    """With beam search: whether the first n outputs that end will do, or all that could be better
    by a rule of thumb (False) or at all ("never") are searched."""

    def __post_init__(self) -> None:
        self._check_types()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_ranges()
        self._check_stops()
        self._check_logit_bias()
        self._check_beam_search()

    @property
    def num_samples(self) -> int:
        """Samples to compute, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

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
            (("cache_salt",), (str, type(None)), "a string or None"),
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
            ("best_of", 1, MAX_N, f"between 1 and {MAX_N}"),
            ("temperature", 0.0, 100.0, "between 0 and 100"),
            ("top_k", -1, 2**31 - 1, "between -1 and 2147483647"),
            ("min_p", 0.0, 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
            # A logit divided or multiplied by more than this is near the end of float32.
            ("repetition_penalty", 0.01, 100.0, "between 0.01 and 100"),
            ("seed", -(2**63), 2**64 - 1, "a 64-bit integer"),
            ("priority", -(2**63), 2**63 - 1, "a 64-bit integer"),
            ("max_tokens", 1, math.inf, "at least 1"),
            ("min_tokens", 0, math.inf, "at least 0"),
            ("logprobs", 0, math.inf, "at least 0"),
            ("prompt_logprobs", 0, math.inf, "at least 0"),
            (
                "length_penalty",
                -MAX_LENGTH_PENALTY,
                MAX_LENGTH_PENALTY,
                f"between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
            ),
        )
        for name, low, high, words in bounds:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(f"{name} must be {words}, not {value}", name)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_CACHE_SALT:
            raise InvalidRequestError(
                f"cache_salt must have 1 to {MAX_CACHE_SALT} characters, not "
                f"{len(self.cache_salt)}",
                "cache_salt",
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p must be in (0, 1], not {self.top_p}", "top_p")
        if self.num_samples < self.n:
            raise InvalidRequestError(f"best_of={self.best_of} is less than n={self.n}", "best_of")
        if self.num_samples > self.n and self.output_kind is RequestOutputKind.DELTA:
            raise InvalidRequestError(
                f"best_of={self.best_of} with n={self.n} cannot be sent as it comes: which samples "
                "are the best shows at the end",
                "best_of",
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

    def _check_beam_search(self) -> None:
        """Values that mean nothing to a search are refused, and those of a search without one."""
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", not {_shown(self.early_stopping)}',
                "early_stopping",
            )
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequestError(
                        f"{name}={_shown(getattr(self, name))} is for beam search; "
                        "set use_beam_search=true",
                        name,
                    )
            return
        for name, neutral in _NEUTRAL_FOR_BEAMS.items():
            value = getattr(self, name)
            if value not in neutral:
                raise InvalidRequestError(
                    f"{name}={_shown(value)} does not go with use_beam_search=true; leave it out",
                    name,
                )


def _shown(value: object) -> str:
    """A value for a message as JSON has it, cut off where it is long."""
    if isinstance(value, enum.Enum):
        text = str(value.name)
    else:
        try:
            text = json.dumps(value, default=repr)
        except (TypeError, ValueError):  # keys that JSON has not, or a list that holds itself
            text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
