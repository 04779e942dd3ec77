"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rawpaged.errors import InvalidRequestError
from rawpaged.server.body import json_response, read_body
from rawpaged.server.context import CONTEXT
from rawpaged.server.prompts import encode_chat, encode_prompts, run_sized
from rawpaged.server.protocol import DetokenizeRequest, TokenizeRequest, parse_body

CHAT_ONLY_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
MAX_DETOKENIZED = 262_144
"""Token ids of one /detokenize."""


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or of a rendered chat, as generation would see them."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request), TokenizeRequest)
    context.check_model(body.model)
    tokenizer = context.require_tokenizer("prompt")
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", "prompt")
    if body.prompt is not None:
        for name in CHAT_ONLY_FIELDS:
            if getattr(body, name) is not None:
                raise InvalidRequestError(f"{name} needs messages", name)
        prompts = await encode_prompts(
            context, [body.prompt], add_special_tokens=body.add_special_tokens is not False
        )
        token_ids = prompts[0].token_ids
    else:
        if body.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens needs prompt: a chat template adds its own",
                "add_special_tokens",
            )
        token_ids = await encode_chat(
            context,
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    token_strs = None
    if body.return_token_strs:
        token_strs = await run_sized(
            lambda: [tokenizer.token_text(token_id) for token_id in token_ids], len(token_ids)
        )
    return json_response(
        TokenizeResponse(
            count=len(token_ids),
            max_model_len=context.engine.max_model_len,
            tokens=token_ids,
            token_strs=token_strs,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens shown."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request), DetokenizeRequest)
    context.check_model(body.model)
    if len(body.tokens) > MAX_DETOKENIZED:
        raise InvalidRequestError(
            f"tokens holds {len(body.tokens)} token ids, the limit is {MAX_DETOKENIZED}", "tokens"
        )
    vocab_size = context.engine.model_config.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is not between 0 and {vocab_size - 1}", "tokens"
            )
    tokenizer = context.require_tokenizer("tokens")
    text = await run_sized(
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), len(body.tokens)
    )
    return json_response(DetokenizeResponse(text))
