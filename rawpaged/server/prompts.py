"""From what a client sends as prompt or messages to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rawpaged.errors import InvalidRequestError
from rawpaged.server.context import ServerContext
from rawpaged.server.protocol import MAX_CHOICES, ChatMessage, PromptField

INLINE_UNITS = 4096
"""Characters or token ids that are worked on at once; more go to a thread, so that streams of other
clients go on meanwhile."""
MAX_CHAT_TEXTS = 2048
"""Messages of a conversation, where one in parts counts as many: templates are slow programs."""
UNITS_PER_CHAT_TEXT = 32
"""What a template does for a turn, whatever it says, in characters of text."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None
    """None when it came as token ids."""


def split_prompts(prompt: PromptField) -> list[str | list[int]]:
    """The prompts of a completion request; raises InvalidRequestError unless all are of one kind.

    A list of integers is one prompt; a list of strings or of lists is a batch.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is empty", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError(
            "prompt mixes kinds: it must be a string, a list of strings, a list of token ids or a "
            "list of lists of token ids",
            "prompt",
        )
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts, the limit is {MAX_CHOICES}", "prompt"
        )
    return cast("list[str | list[int]]", prompt)


async def encode_prompts(
    context: ServerContext, prompts: Sequence[str | list[int]], *, add_special_tokens: bool
) -> list[Prompt]:
    """Token ids of every prompt; lengths and ids are not checked yet."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [Prompt(list(cast("list[int]", prompt)), None) for prompt in prompts]
    tokenizer = context.require_tokenizer("prompt")
    for text in texts:
        _check_length(context, len(text), "prompt")

    def encode_all() -> list[Prompt]:
        return [
            Prompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)
            for text in texts
        ]

    return await run_sized(encode_all, sum(map(len, texts)))


async def encode_chat(
    context: ServerContext,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Token ids of a rendered conversation, by default up to where the assistant speaks.

    Raises InvalidRequestError for too many texts or characters, and for what the tokenizer or the
    model's template refuses.
    """
    tokenizer = context.require_tokenizer("messages")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    num_texts = sum(message.num_texts for message in messages)
    if num_texts > MAX_CHAT_TEXTS:
        raise InvalidRequestError(
            f"messages holds {num_texts} messages and parts, the limit is {MAX_CHAT_TEXTS}",
            "messages",
        )
    num_characters = sum(message.num_characters for message in messages)
    _check_length(context, num_characters, "messages")
    turns = [message.for_template() for message in messages]

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            turns,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            chat_template_kwargs=chat_template_kwargs,
        )

    return await run_sized(encode, num_characters + UNITS_PER_CHAT_TEXT * num_texts)


def _check_length(context: ServerContext, num_characters: int, name: str) -> None:
    """Refuse text that cannot fit, without spending the time to tokenize it."""
    max_model_len = context.engine.max_model_len
    most = context.require_tokenizer(name).most_characters(max_model_len)
    if num_characters > most:
        raise InvalidRequestError(
            f"{name} has {num_characters} characters; max_model_len={max_model_len} tokens are "
            f"{most} at most",
            name,
        )


async def run_sized(function: Callable[[], T], num_units: int) -> T:
    """The function's result; it runs in a thread if it has more than INLINE_UNITS to work on."""
    if num_units <= INLINE_UNITS:
        return function()
    return await asyncio.to_thread(function)
