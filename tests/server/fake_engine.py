"""An engine without a model: sample i repeats the prompt, starting at its token i.

It keeps the contract of AsyncEngine that the server relies on, and can be told to be slow or to
fail.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rawpaged.config import EngineConfig
from rawpaged.errors import EngineClosedError, InvalidRequestError
from rawpaged.models.config import ModelConfig, RopeConfig
from rawpaged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from rawpaged.sampling_params import RequestOutputKind, SamplingParams

BOS = 256
VOCAB_SIZE = 257


class FakeTokenizer:
    """One token a byte of UTF-8, after one begin-of-sequence token."""

    def most_characters(self, num_tokens: int) -> int:
        return 4 * num_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        bos = b"" if skip_special_tokens else b"<s>"
        return b"".join(bos if t == BOS else bytes([t]) for t in token_ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == BOS else bytes([token_id]).decode(errors="replace")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not messages:
            raise InvalidRequestError("messages is empty", "messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message excludes add_generation_prompt", "continue_final_message"
            )
        if {"messages", "add_generation_prompt"} & set(chat_template_kwargs or ()):
            raise InvalidRequestError("reserved name", "chat_template_kwargs")
        turns = [f"{message['role']}:{_text(message['content'])}" for message in messages]
        text = "".join(f"{turn}\n" for turn in turns)
        if continue_final_message:
            text = text.removesuffix("\n")
        if add_generation_prompt:
            text += "assistant:"
        suffix = (chat_template_kwargs or {}).get("suffix", "")
        return self.encode(f"{text}{suffix}")


def _text(content: str | list[dict[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


class FakeStream:
    """The contract of OutputStream, with so many outputs that come at once."""

    def __init__(self, outputs: AsyncIterator[RequestOutput], num_at_once: int) -> None:
        self._outputs = outputs
        self._num_at_once = num_at_once
        self._ready: list[RequestOutput] = []
        self._end: Exception | None = None

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._end is None and len(self._ready) < self._num_at_once:
            try:
                self._ready.append(await anext(self._outputs))
            except Exception as error:
                self._end = error
        if not self._ready:
            assert self._end is not None
            raise self._end
        return self._ready.pop(0)

    def take_ready(self) -> list[RequestOutput]:
        ready, self._ready = self._ready, []
        return ready


class FakeEngine:
    def __init__(
        self,
        *,
        max_model_len: int = 256,
        delay: float = 0.0,
        tokenizer: FakeTokenizer | None = None,
        has_tokenizer: bool = True,
    ) -> None:
        self.config = EngineConfig(model="fake/model", max_model_len=max_model_len)
        self.model_config = ModelConfig(
            architecture="fake",
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            max_position_embeddings=max_model_len,
            rms_norm_eps=1e-6,
            rope=RopeConfig(),
            tie_word_embeddings=True,
        )
        self.max_model_len = max_model_len
        self.tokenizer = (tokenizer or FakeTokenizer()) if has_tokenizer else None
        self.delay = delay
        """Seconds before each token."""
        self.is_running = True
        self.num_queued = 0
        self.is_sleeping = False
        self.num_at_once = 1
        """Outputs of a request that come together."""
        self.failure: Exception | None = None
        """Raised by a request after `fail_after` tokens."""
        self.fail_after = 0
        self.calls: list[tuple[list[int], SamplingParams]] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.live: dict[str, asyncio.Event] = {}

    def validate(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        assert not isinstance(prompt, str)
        if not prompt:
            raise InvalidRequestError("prompt is empty", "prompt")
        self._check_ids(prompt, "prompt")
        self._check_ids(params.stop_token_ids or (), "stop_token_ids")
        self._check_ids(params.logit_bias or (), "logit_bias")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.config.max_logprobs:
                raise InvalidRequestError(
                    f"{name} must be at most {self.config.max_logprobs}", name
                )
        if len(prompt) + (params.max_tokens or 1) > self.max_model_len:
            raise InvalidRequestError(
                f"prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed "
                f"max_model_len={self.max_model_len}",
                "max_tokens" if params.max_tokens else "prompt",
            )
        if params.min_tokens > self.max_model_len - len(prompt):
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} does not fit max_model_len={self.max_model_len}",
                "min_tokens",
            )
        return list(prompt)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> FakeStream:
        return FakeStream(self._generate(prompt, sampling_params, request_id), self.num_at_once)

    async def _generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        if not self.is_running:
            raise EngineClosedError("the engine is closed")
        request_id = request_id or uuid.uuid4().hex
        assert request_id not in self.live
        prompt_ids = self.validate(prompt, sampling_params)
        self.calls.append((prompt_ids, sampling_params))
        self.live[request_id] = asyncio.Event()
        try:
            async for output in self._run(prompt_ids, sampling_params, request_id):
                yield output
            self.finished.append(request_id)
        finally:
            if self.live.pop(request_id, None) and request_id not in self.finished:
                self.aborted.append(request_id)

    async def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self.live[request_id].set()

    def close(self) -> None:
        self.is_running = False

    async def _run(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        is_delta = params.output_kind is RequestOutputKind.DELTA
        aborted = self.live[request_id]
        limit = params.max_tokens or self.max_model_len - len(prompt_ids)
        tokens: list[list[int]] = [[] for _ in range(params.n)]
        for step in range(limit):
            if self.failure is not None and step == self.fail_after:
                raise self.failure
            await asyncio.sleep(0)
            if self.delay and not aborted.is_set():
                await _wait(aborted, self.delay)
            reason = "abort" if aborted.is_set() else "length" if step == limit - 1 else None
            for i in range(params.n):
                if reason != "abort":
                    tokens[i].append(prompt_ids[(step + i) % len(prompt_ids)])
            if is_delta or reason:
                yield self._output(prompt_ids, params, request_id, tokens, step, reason)
            if reason:
                return

    def _output(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        tokens: list[list[int]],
        step: int,
        reason: str | None,
    ) -> RequestOutput:
        is_delta = params.output_kind is RequestOutputKind.DELTA
        samples = []
        for index, all_ids in enumerate(tokens):
            ids = list(all_ids[step:] if is_delta else all_ids)
            samples.append(
                CompletionOutput(
                    index=index,
                    text=self.tokenizer.decode(ids) if self.tokenizer else "",
                    token_ids=ids,
                    cumulative_logprob=None,
                    logprobs=[self._position(t, params.logprobs) for t in ids]
                    if params.logprobs is not None
                    else None,
                    finish_reason=reason,
                    stop_reason=None,
                )
            )
            if params.use_beam_search:
                # The third beam had no probability at all.
                score = -20000.0 * (index + 1) if index < 2 else float("-inf")
                samples[-1] = replace(samples[-1], cumulative_logprob=score, beam_score=score / 2)
        positions: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None and (step == 0 or not is_delta):
            count = params.prompt_logprobs
            positions = [None, *(self._position(t, count) for t in prompt_ids[1:])]
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=positions,
            outputs=samples,
            finished=reason is not None,
            num_cached_tokens=len(prompt_ids) // 16 * 16,
        )

    def _position(self, token_id: int, count: int | None) -> TokenLogprobs:
        """The chosen token ranks second, the id after it first, the following ids after both."""
        ids = [token_id + 1, token_id, *range(token_id + 2, token_id + VOCAB_SIZE)]
        entries = {token_id: self._logprob(token_id, 2)}
        for rank, ranked_id in enumerate(ids[: count or 0], start=1):
            entries[ranked_id % VOCAB_SIZE] = self._logprob(ranked_id % VOCAB_SIZE, rank)
        return entries

    def _logprob(self, token_id: int, rank: int) -> Logprob:
        text = self.tokenizer.token_text(token_id) if self.tokenizer else ""
        return Logprob(
            logprob=float("-inf") if rank > 4 else -0.5 * rank, rank=rank, decoded_token=text
        )

    def _check_ids(self, token_ids: Sequence[int] | Mapping[int, float], param: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise InvalidRequestError(f"{param}: token id {token_id} is out of range", param)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
