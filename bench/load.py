"""The client: sends completion requests to a server and notes when each chunk arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    url: str
    model: str
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds that a request may take."""

    def session(self) -> aiohttp.ClientSession:
        """A session that opens as many connections as there are requests under way."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return aiohttp.ClientSession(
            base_url=self.url.rstrip("/") + "/",
            headers=headers,
            # Some servers close a connection after each stream, and a request on it would be lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
        )


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it; times are of one monotonic clock, in seconds."""

    started: float
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """Arrivals of chunks that carry output."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the server took from its prefix cache; None if it does not say."""
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds an output token after the first; None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks."""
        pairs = zip(self.chunk_times, self.chunk_times[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


class _StreamError(Exception):
    """The server answered, but not with a whole stream of a completion."""


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    output_len: int,
    concurrency: int | None,
    arrivals: Sequence[float],
) -> tuple[list[RequestRecord], float]:
    """Records in the order of the prompts, and the seconds from the first send to the last end.

    Each request waits for its arrival time and, unless `concurrency` is None, for one of so many
    places. No failure ends the run; it is in the request's record.
    """
    places = asyncio.Semaphore(concurrency or len(prompts))
    async with target.session() as session:
        started = time.perf_counter()

        async def send(prompt: Prompt, arrival: float) -> RequestRecord:
            await asyncio.sleep(max(0.0, started + arrival - time.perf_counter()))
            async with places:
                return await complete(session, target.model, prompt, output_len)

        records = await asyncio.gather(*map(send, prompts, arrivals))
        return list(records), time.perf_counter() - started


async def complete(
    session: aiohttp.ClientSession, model: str, prompt: Prompt, output_len: int
) -> RequestRecord:
    """Stream one completion of exactly `output_len` tokens, greedily."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = RequestRecord(started=time.perf_counter())
    try:
        async with session.post("v1/completions", json=body) as response:
            if response.status != 200:
                text = await response.text(errors="replace")
                raise _StreamError(f"HTTP {response.status}: {text[:200]}")
            await _read_stream(response, record)
    except _StreamError as error:
        record.error = str(error)
    except Exception as error:  # whatever a server does belongs to this request alone
        record.error = f"{type(error).__name__}: {error}"
    record.ended = time.perf_counter()
    return record


async def first_model(target: Target) -> str:
    """The first name in the server's list of models."""
    async with target.session() as session, session.get("v1/models") as response:
        response.raise_for_status()
        body = await response.json()
        return str(body["data"][0]["id"])


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    """Fill in the record up to `[DONE]`; raises _StreamError for anything but a whole answer."""
    has_usage = finished = False
    async for line in response.content:
        arrived = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise _StreamError(f"error in the stream: {json.dumps(event['error'])[:200]}")
        for choice in event.get("choices", ()):
            ends = choice.get("finish_reason") is not None
            finished = finished or ends
            # Some servers end with a chunk of its own that carries no token.
            if choice.get("text") or not ends or not record.chunk_times:
                record.chunk_times.append(arrived)
        if event.get("usage"):
            has_usage = True
            _count_tokens(event["usage"], record)
    else:
        raise _StreamError("the stream ended without [DONE]")
    if not finished:
        raise _StreamError("the stream ended without a finish_reason")
    if not has_usage:
        raise _StreamError("the server sent no usage")


def _count_tokens(usage: dict[str, Any], record: RequestRecord) -> None:
    record.prompt_tokens = int(usage["prompt_tokens"])
    record.completion_tokens = int(usage["completion_tokens"])
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    record.cached_tokens = None if cached is None else int(cached)
