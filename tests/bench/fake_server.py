"""A completions server without a model: it streams on a timetable and can be told to fail.

As a script, `fake_server.py PORT [EXIT_STATUS]`, it serves until SIGTERM or fails at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """How the server behaves, and what it was asked."""

    first_delay: float = 0.0
    gap: float = 0.0
    tokens_per_chunk: int = 1
    closing_chunk: bool = False
    """End with a chunk of its own that has a finish_reason and no text."""
    empty_text: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    """Number of a request, from 0 -> "status", "error", "cut", "unfinished" or "usage"."""
    output_tokens: int | None = None
    """Tokens of each answer, instead of as many as were asked for."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    wait_for: int = 0
    """Hold all answers until this many requests were under way at once."""
    sent: list[float] = field(default_factory=list)
    """When each chunk of output was about to be sent, on the client's clock."""
    under_way: int = 0
    most_under_way: int = 0
    url: str = ""

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}, {"id": "other"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        failure = self.failures.get(len(self.bodies))
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if failure == "status":
            return web.json_response({"error": {"message": "no"}}, status=500)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while self.most_under_way < self.wait_for:
                await asyncio.sleep(0.001)
            await self._stream(response, body, failure)
        finally:
            self.under_way -= 1
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], failure: str | None
    ) -> None:
        tokens = self.output_tokens or body["max_tokens"]
        chunks = -(-tokens // self.tokens_per_chunk)
        await asyncio.sleep(self.first_delay)
        for i in range(chunks):
            if i > 0:
                await asyncio.sleep(self.gap)
            if failure == "error" and i == chunks - 1:
                await _send(response, {"error": {"message": "broken"}})
                return
            ends = i == chunks - 1 and not self.closing_chunk and failure != "unfinished"
            self.sent.append(time.perf_counter())
            await _send(response, _chunk("" if self.empty_text else "x", ends))
        if failure == "cut":
            return
        if self.closing_chunk:
            await _send(response, _chunk("", True))
        if failure != "usage":
            prompt = body["prompt"]
            count = len(prompt.split() if isinstance(prompt, str) else prompt)
            usage = {
                "prompt_tokens": count,
                "completion_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")


def _chunk(text: str, ends: bool) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "length" if ends else None}
    return {"choices": [choice], "usage": None}


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """The server on a free port of localhost, in a thread of its own."""
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        state.update(loop=asyncio.get_running_loop(), stop=asyncio.Event())
        runner = web.AppRunner(server.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await state["stop"].wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    try:
        yield server
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(20)
    assert not thread.is_alive()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(int(sys.argv[2]))
    web.run_app(FakeServer().application(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
