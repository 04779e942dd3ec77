"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import UNSET, UnsetType

from rawpaged.errors import InvalidRequestError
from rawpaged.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from rawpaged.sampling_params import SamplingParams
from rawpaged.server.body import json_response, read_body
from rawpaged.server.context import CONTEXT, ServerContext
from rawpaged.server.generation import generate_all, name_request, validate_all
from rawpaged.server.logprobs import (
    CompletionLogprobsWriter,
    add_beam_scores,
    prompt_logprobs,
)
from rawpaged.server.prompts import Prompt, encode_prompts, split_prompts
from rawpaged.server.protocol import (
    MAX_CHOICES,
    NEUTRAL_VALUES,
    CompletionRequest,
    parse_body,
    renamed_errors,
)
from rawpaged.server.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
    UsageCounter,
)
from rawpaged.server.sse import respond_with_events


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Samples for one prompt or a batch of them; choice `prompt_index * n + i` is sample i."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request), CompletionRequest, NEUTRAL_VALUES)
    request_id = name_request("cmpl", body)
    model = context.check_model(body.model)
    with context.admission.job():
        params = completion_params(body)
        prompts = await encode_prompts(
            context,
            split_prompts(body.prompt),
            add_special_tokens=body.add_special_tokens is not False,
        )
        if len(prompts) * params.num_samples > MAX_CHOICES:
            name = "n" if params.best_of is None else "best_of"
            raise InvalidRequestError(
                f"{len(prompts)} prompts of {name}={params.num_samples} are more than "
                f"{MAX_CHOICES} choices",
                name,
            )
        token_ids = [prompt.token_ids for prompt in prompts]
        with renamed_errors(_engine_names(body)):
            validate_all(context, token_ids, params)
        outputs = generate_all(context, token_ids, params, request_id)
        answer = CompletionAnswer(context, body, request_id, model, prompts, params, outputs)
        if body.stream:
            return await respond_with_events(request, answer.chunks())
        return json_response(await answer.whole())


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Sampling parameters of a completion; raises InvalidRequestError.

    `echo` with `logprobs` asks for those of the prompt too. `max_tokens=0`, which scores a prompt
    without continuing it, becomes one token that is generated and not shown.
    """
    body.check_stream()
    overrides: dict[str, int | None] = {"logprobs": body.logprobs, "best_of": body.best_of}
    if body.echo and body.prompt_logprobs is None:
        overrides["prompt_logprobs"] = body.logprobs
    if body.echo and body.max_tokens == 0:
        overrides["max_tokens"] = 1
    with renamed_errors(_engine_names(body)):
        return body.sampling_params(**overrides)


def _engine_names(body: CompletionRequest) -> dict[str, str]:
    return {"prompt_logprobs": "logprobs"} if body.prompt_logprobs is None else {}


@dataclass(slots=True)
class CompletionAnswer:
    """The response to one completion request, whole or in chunks."""

    context: ServerContext
    body: CompletionRequest
    request_id: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    outputs: AsyncGenerator[tuple[int, list[RequestOutput]], None]
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: dict[int, int] = field(default_factory=dict)
    """Choice index -> text offset of its next token."""
    _prompt_logprobs: dict[int, list[TokenLogprobs | None] | None] = field(default_factory=dict)

    async def whole(self) -> CompletionResponse:
        usage = self._usage_counter()
        choices = []
        async with aclosing(self.outputs) as batches:
            async for prompt_index, outputs in batches:
                for output in outputs:
                    self._count(usage, prompt_index, output)
                    choices += [self._choice(prompt_index, output, s) for s in output.outputs]
        choices.sort(key=lambda choice: choice.index)
        return self._response(choices, usage.usage)

    async def chunks(self) -> AsyncGenerator[list[CompletionResponse], None]:
        """One chunk for each sample that has news, then one with the usage if asked for.

        As many at a time as are there.
        """
        options = self.body.stream_options
        usage = self._usage_counter()
        silent = None if options and options.include_usage else UNSET
        async with aclosing(self.outputs) as batches:
            async for prompt_index, outputs in batches:
                chunks = []
                for output in outputs:
                    self._count(usage, prompt_index, output)
                    so_far = usage.usage if options and options.continuous_usage_stats else silent
                    for sample in output.outputs:
                        choice = self._choice(prompt_index, output, sample)
                        chunks.append(self._response([choice], so_far))
                yield chunks
        if options and options.include_usage:
            yield [self._response([], usage.usage)]

    def _usage_counter(self) -> UsageCounter:
        return UsageCounter(sum(len(prompt.token_ids) for prompt in self.prompts))

    def _count(self, usage: UsageCounter, prompt_index: int, output: RequestOutput) -> None:
        usage.add(prompt_index, output, generated=not self._scores_only)
        # In a stream only the first output has them, and a sample may begin in a later one.
        self._prompt_logprobs.setdefault(prompt_index, output.prompt_logprobs)

    @property
    def _scores_only(self) -> bool:
        return bool(self.body.echo) and self.body.max_tokens == 0

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _choice(
        self, prompt_index: int, output: RequestOutput, sample: CompletionOutput
    ) -> CompletionChoice:
        """The sample's news, after its prompt where that is to be echoed and this is its first."""
        index = prompt_index * self.params.n + sample.index
        is_first = index not in self._begun
        prompt = self.prompts[prompt_index]
        text = "" if self._scores_only else sample.text
        if is_first and self.body.echo:
            text = self._prompt_text(prompt) + text
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, prompt_index, sample),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
        if not self._scores_only:
            add_beam_scores(choice, sample)
        if self.body.return_token_ids:
            choice.token_ids = [] if self._scores_only else sample.token_ids
            if is_first:
                choice.prompt_token_ids = prompt.token_ids
        if self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs[prompt_index] or [])
        return choice

    def _prompt_text(self, prompt: Prompt) -> str:
        """The prompt as it was sent, special tokens among token ids spelled out."""
        tokenizer = self.context.engine.tokenizer
        if prompt.text is not None or tokenizer is None:
            return prompt.text or ""
        return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _logprobs(
        self, index: int, prompt_index: int, sample: CompletionOutput
    ) -> CompletionLogprobs | None:
        """Logprobs of the sample's new tokens, and of the echoed prompt's on the first call."""
        is_first = index not in self._begun
        text_offset = self._begun.setdefault(index, 0)
        if self.body.logprobs is None:
            return None
        writer = CompletionLogprobsWriter(
            text_offset=text_offset, tokens_as_ids=self.body.return_tokens_as_token_ids
        )
        positions = self._prompt_logprobs[prompt_index]
        # None also when the request was aborted before its prompt was computed.
        if is_first and self.body.echo and positions is not None:
            first, *others = self.prompts[prompt_index].token_ids
            tokenizer = self.context.engine.tokenizer
            writer.add_first_prompt_token(first, tokenizer.token_text(first) if tokenizer else "")
            writer.add(others, [position for position in positions[1:] if position])
        if not self._scores_only:
            writer.add(sample.token_ids, sample.logprobs or [])
        self._begun[index] = writer.text_offset
        return writer.logprobs
