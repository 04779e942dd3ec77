"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import UNSET, UnsetType

from rawpaged.errors import InvalidRequestError
from rawpaged.outputs import CompletionOutput, RequestOutput
from rawpaged.sampling_params import SamplingParams
from rawpaged.server.body import json_response, read_body
from rawpaged.server.context import CONTEXT, ServerContext
from rawpaged.server.generation import generate_all, name_request, validate_all
from rawpaged.server.logprobs import add_beam_scores, chat_logprobs, prompt_logprobs
from rawpaged.server.prompts import encode_chat
from rawpaged.server.protocol import (
    NEUTRAL_CHAT_VALUES,
    ChatRequest,
    parse_body,
    renamed_errors,
)
from rawpaged.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatResponse,
    ChunkChoice,
    Delta,
    ResponseMessage,
    Usage,
    UsageCounter,
)
from rawpaged.server.sse import respond_with_events


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """The next turn of a conversation, `n` samples of it."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request), ChatRequest, NEUTRAL_CHAT_VALUES)
    request_id = name_request("chatcmpl", body)
    model = context.check_model(body.model)
    with context.admission.job():
        params = chat_params(body)
        prompt_token_ids = await encode_chat(
            context,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        with renamed_errors(_engine_names(body)):
            validate_all(context, [prompt_token_ids], params)
        outputs = generate_all(context, [prompt_token_ids], params, request_id)
        answer = ChatAnswer(context, body, request_id, model, prompt_token_ids, params, outputs)
        if body.stream:
            return await respond_with_events(request, answer.chunks())
        return json_response(await answer.whole())


def chat_params(body: ChatRequest) -> SamplingParams:
    """Sampling parameters of a chat; without a limit, as many tokens as the model has room for.

    Raises InvalidRequestError.
    """
    body.check_stream()
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", "top_logprobs")
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequestError(
                "max_completion_tokens and max_tokens differ; send one of them",
                "max_completion_tokens",
            )
        max_tokens = body.max_completion_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    with renamed_errors(_engine_names(body)):
        return body.sampling_params(max_tokens=max_tokens, logprobs=num_top)


def _engine_names(body: ChatRequest) -> dict[str, str]:
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


@dataclass(slots=True)
class ChatAnswer:
    """The response to one chat request, whole or in chunks."""

    context: ServerContext
    body: ChatRequest
    request_id: str
    model: str
    prompt_token_ids: list[int]
    params: SamplingParams
    outputs: AsyncGenerator[tuple[int, list[RequestOutput]], None]
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> ChatResponse:
        usage = UsageCounter(len(self.prompt_token_ids))
        response = ChatResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=[],
            usage=usage.usage,
        )
        async with aclosing(self.outputs) as batches:
            async for _, outputs in batches:
                for output in outputs:
                    usage.add(0, output)
                    response.choices += [self._choice(sample) for sample in output.outputs]
                    if self.body.prompt_logprobs is not None:
                        response.prompt_logprobs = prompt_logprobs(output.prompt_logprobs or [])
        response.choices.sort(key=lambda choice: choice.index)
        response.usage = usage.usage
        if self.body.return_token_ids:
            response.prompt_token_ids = self.prompt_token_ids
        return response

    async def chunks(self) -> AsyncGenerator[list[ChatChunk], None]:
        """A role for each sample, then their news as they come, then the usage if asked for.

        As many at a time as are there.
        The roles wait for the first news, so that the first chunk a client sees also tells the
        time to the first token.
        """
        options = self.body.stream_options
        usage = UsageCounter(len(self.prompt_token_ids))
        silent = None if options and options.include_usage else UNSET
        begun = False
        async with aclosing(self.outputs) as batches:
            async for _, outputs in batches:
                chunks = []
                for output in outputs:
                    usage.add(0, output)
                    so_far = usage.usage if options and options.continuous_usage_stats else silent
                    if not begun:
                        begun = True
                        chunks += self._role_chunks(so_far)
                    chunks += [
                        self._chunk([self._chunk_choice(sample)], so_far)
                        for sample in output.outputs
                    ]
                yield chunks
        if options and options.include_usage:
            yield [self._chunk([], usage.usage)]

    def _role_chunks(self, usage: Usage | UnsetType | None) -> list[ChatChunk]:
        chunks = [
            self._chunk([ChunkChoice(index=i, delta=Delta(role="assistant", content=""))], usage)
            for i in range(self.params.n)
        ]
        if self.body.return_token_ids:
            chunks[0].prompt_token_ids = self.prompt_token_ids
        return chunks

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, sample: CompletionOutput) -> ChatChoice:
        choice = ChatChoice(
            index=sample.index,
            message=ResponseMessage(content=sample.text),
            logprobs=self._logprobs(sample),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self.body.return_token_ids else UNSET,
        )
        add_beam_scores(choice, sample)
        return choice

    def _chunk_choice(self, sample: CompletionOutput) -> ChunkChoice:
        return ChunkChoice(
            index=sample.index,
            delta=Delta(content=sample.text),
            logprobs=self._logprobs(sample),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self.body.return_token_ids else UNSET,
        )

    def _logprobs(self, sample: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(
            sample.token_ids,
            sample.logprobs or [],
            num_top=self.body.top_logprobs or 0,
            tokens_as_ids=self.body.return_tokens_as_token_ids,
        )
