"""From what a client sends as prompt or messages to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rawpaged.errors import InvalidRequestError
from rawpaged.server.context import ServerContext
from rawpaged.server.protocol import MAX_CHOICES, ChatMessage, PromptField

INLINE_CHARACTERS = 4096
"""Text up to this long is tokenized at once; longer text goes to a thread, so that streams of
other clients go on meanwhile."""

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

    return await _run(encode_all, sum(map(len, texts)))


async def encode_chat(
    context: ServerContext,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Token ids of a rendered conversation, by default up to where the assistant speaks.

    Raises InvalidRequestError for what the tokenizer or the model's template refuses.
    """
    tokenizer = context.require_tokenizer("messages")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
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

    return await _run(encode, num_characters)


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


async def _run(function: Callable[[], T], num_characters: int) -> T:
    if num_characters <= INLINE_CHARACTERS:
        return function()
    return await asyncio.to_thread(function)
