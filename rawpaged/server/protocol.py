"""Request bodies: every field that is honoured, with its type; anything else is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

import msgspec

from rawpaged.errors import InvalidRequestError
from rawpaged.sampling_params import RequestOutputKind, SamplingParams
from rawpaged.server.json_fields import decode_fields, in_json_words, shown_name

MAX_CHOICES = 2048
"""Samples of one HTTP request: prompts times n."""

PromptField = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common; None stands for the default throughout."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: str | None = None

    def check_stream(self) -> None:
        """Raises InvalidRequestError for fields at odds with `stream`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs needs stream=false", "prompt_logprobs")
        if self.use_beam_search and self.stream:
            raise InvalidRequestError(
                "use_beam_search needs stream=false: beams change until the search has ended",
                "use_beam_search",
            )

    def sampling_params(self, **overrides: int | None) -> SamplingParams:
        """The engine's parameters; raises InvalidRequestError for a value out of range."""
        values = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**{**values, **overrides, "output_kind": kind})


_SAMPLING_FIELDS = tuple(
    name for name in GenerationRequest.__struct_fields__ if hasattr(SamplingParams, name)
)


class CompletionRequest(GenerationRequest):
    prompt: PromptField
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


Role = Literal["system", "developer", "user", "assistant"]
PartType = Literal["text"]


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: PartType
    text: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn; the fields that are only null come back from clients which replay an answer."""

    role: Role
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def num_characters(self) -> int:
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.text) for part in self.content)

    @property
    def num_texts(self) -> int:
        """Parts of the message, at least one."""
        return 1 if isinstance(self.content, str) else max(1, len(self.content))

    def for_template(self) -> dict[str, Any]:
        """The message as the tokenizer takes it, without the fields that are null."""
        # OpenAI renamed the system role; the templates of open models know the old name.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content}
        if not isinstance(self.content, str):
            message["content"] = [{"type": "text", "text": part.text} for part in self.content]
        for name in ("name", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a text or a chat to turn into token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


# Fields that clients send with values which ask for nothing: those values pass, others do not.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "detokenize": (None, True),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logits_processors": (None, []),
    "metadata": (None, {}),
    "parallel_tool_calls": (None, True),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
}
NEUTRAL_CHAT_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    "best_of": (None, 1),
    "add_special_tokens": (None, False),
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NO_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {}

R = TypeVar("R", bound=msgspec.Struct)


def parse_body(
    body: bytes, request_type: type[R], neutral: Mapping[str, tuple[Any, ...]] = NO_NEUTRAL_VALUES
) -> R:
    """The body as `request_type`.

    Raises InvalidRequestError, whose `param` is the top-level field at fault, for bytes that are
    no JSON object, for names given twice, for wrong types, and for any field that is neither one
    of the type's nor in `neutral` with a value listed there.
    """
    fields = decode_fields(body)
    for name in list(fields):
        if name in request_type.__struct_fields__:
            continue
        if name not in neutral:
            shown = shown_name(name)
            raise InvalidRequestError(f"unknown or unsupported field `{shown}`", shown)
        if fields[name] not in neutral[name]:
            raise InvalidRequestError(
                f"`{name}` is not supported, except with the value "
                + " or ".join(msgspec.json.encode(value).decode() for value in neutral[name]),
                name,
            )
        del fields[name]
    try:
        return msgspec.convert(fields, request_type, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except _OVERFLOWS:
        culprit = _find_overflow(fields, request_type)
        raise InvalidRequestError(f"{culprit}: number out of range", culprit) from None


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """InvalidRequestErrors about the engine's name of a field tell the client's name for it."""
    try:
        yield
    except InvalidRequestError as error:
        old = error.param
        if old is None or old not in names:
            raise
        new = names[old]
        text = str(error)
        if text.startswith(old):
            text = new + text.removeprefix(old)
        raise InvalidRequestError(text, new) from None


# What releases of msgspec raise for an integer beyond the range of floats where a float belongs.
_OVERFLOWS = (OverflowError, SystemError)


def _find_overflow(fields: Mapping[str, Any], request_type: type[msgspec.Struct]) -> str | None:
    for field in msgspec.structs.fields(request_type):
        try:
            msgspec.convert(fields.get(field.name), field.type, str_keys=True)
        except _OVERFLOWS:
            return field.name
        except msgspec.ValidationError:
            continue
    return None


_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_CHOICES = {"role": get_args(Role), "type": get_args(PartType)}
"""What fields of a fixed set of strings may hold, by their own name."""
_PATH = re.compile(
    r"(?P<text>.*) - at (?P<key>`key` in )?`\$\.(?P<path>(?P<field>\w+).*)`", re.DOTALL
)


def _explain(text: str) -> InvalidRequestError:
    """msgspec's text, with the place in front, as an error that names the top-level field."""
    field = path = None
    if match := _PATH.fullmatch(text):
        text, field, path = in_json_words(match["text"]), match["field"], match["path"]
        if match["key"]:
            is_word = text == "Expected `integer`, got `string`"
            text = 'keys must be integers in quotes, such as "42"' if is_word else f"keys: {text}"
    if match := _MISSING.fullmatch(text):
        text = f"missing required field `{match['name']}`"
        field = field or match["name"]
    elif match := _UNKNOWN.fullmatch(text):
        text = f"unknown or unsupported field `{match['name'][:100]}`"
    elif path and (match := _NO_CHOICE.fullmatch(text)):
        choices = _CHOICES[path.rpartition(".")[2]]
        text = f"{match['value'][:100]} is not supported, only {', '.join(choices)}"
    return InvalidRequestError(f"{path}: {text}" if path else text, field)
