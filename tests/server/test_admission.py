"""Clients that leave, clients that are slow, and requests that fail beside others."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import pytest

from rawpaged.outputs import RequestOutput
from rawpaged.server.admission import merge
from tests.server.client import complete
from tests.server.conftest import Server, serve
from tests.server.fake_engine import FakeEngine


def wait_until(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.005)


def post_raw(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave its answer unread."""
    parts = urlsplit(server.url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
    data = json.dumps({"model": "fake", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "num_requests"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2}, 1),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 1),
    ],
)
def test_a_client_that_leaves_aborts_its_requests(
    path: str, prompt: dict[str, Any], num_requests: int, stream: bool
) -> None:
    with serve(FakeEngine(delay=0.05)) as server:
        connection = post_raw(server, path, {**prompt, "stream": stream, "max_tokens": 200})
        wait_until(lambda: len(server.engine.live) == num_requests)
        if stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
        wait_until(lambda: len(server.engine.aborted) == num_requests)
        assert not server.engine.live
        assert not server.engine.finished


def test_leaving_before_the_first_token() -> None:
    with serve(FakeEngine(delay=30)) as server:
        for stream in (False, True):
            connection = post_raw(server, "/v1/completions", {"prompt": "a", "stream": stream})
            wait_until(lambda: len(server.engine.live) == 1)
            connection.close()
            wait_until(lambda: not server.engine.live)
        assert len(server.engine.aborted) == 2


def test_a_slow_reader_is_waited_for_and_holds_up_nobody() -> None:
    num_tokens = 100_000
    with serve(FakeEngine(max_model_len=2 * num_tokens)) as server:
        connection = post_raw(
            server, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": num_tokens}
        )
        wait_until(lambda: bool(server.engine.live))
        assert complete(server.url).status == 200
        time.sleep(0.5)
        # 20 MB of events do not fit the socket buffers: the fake engine stands still.
        assert server.engine.live
        assert complete(server.url).status == 200
        connection.close()
        wait_until(lambda: not server.engine.live)


def test_equal_request_ids_do_not_meet() -> None:
    with serve(FakeEngine(delay=0.05)) as server:
        body = {"prompt": "a", "request_id": "same", "max_tokens": 200}
        first = post_raw(server, "/v1/completions", body)
        second = post_raw(server, "/v1/completions", {**body, "max_tokens": 10})
        wait_until(lambda: len(server.engine.live) == 2)
        first.close()
        assert second.recv(12) == b"HTTP/1.1 200"
        assert len(server.engine.finished) == 1
        second.close()


def output(text: str) -> RequestOutput:
    return RequestOutput(
        request_id=text,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[],
        finished=False,
        num_cached_tokens=0,
    )


class Source:
    """A stream that notes whether it was closed."""

    def __init__(self, name: str, count: int, error: Exception | None = None) -> None:
        self.name = name
        self.count = count
        self.error = error
        self.num_sent = 0
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[list[RequestOutput], None]:
        try:
            for _ in range(self.count):
                await asyncio.sleep(0)
                self.num_sent += 1
                yield [output(self.name)]
            if self.error:
                raise self.error
        finally:
            self.is_closed = True


def test_merge_yields_everything() -> None:
    sources = [Source("a", 3), Source("b", 0), Source("c", 5)]

    async def main() -> list[tuple[int, str]]:
        merged = merge([source.stream() for source in sources])
        return [(index, item.request_id) async for index, items in merged for item in items]

    assert sorted(asyncio.run(main())) == [(0, "a")] * 3 + [(2, "c")] * 5


@pytest.mark.parametrize("count", [1, 3])
def test_merge_closes_its_streams_when_left(count: int) -> None:
    sources = [Source(str(i), 100) for i in range(count)]

    async def main() -> None:
        async with aclosing(merge([source.stream() for source in sources])) as merged:
            async for _ in merged:
                break
        assert all(source.is_closed for source in sources)

    asyncio.run(main())


def test_merge_closes_the_others_when_one_fails() -> None:
    sources = [Source("a", 1000), Source("b", 2, ValueError("b failed")), Source("c", 1000)]

    async def main() -> None:
        with pytest.raises(ValueError, match="b failed"):
            _ = [item async for item in merge([source.stream() for source in sources])]
        assert all(source.is_closed for source in sources)

    asyncio.run(main())


def test_merge_holds_its_streams_back() -> None:
    sources = [Source("a", 1000), Source("b", 1000)]

    async def main() -> None:
        async with aclosing(merge([source.stream() for source in sources])) as merged:
            async for _ in merged:
                await asyncio.sleep(0.05)
                break
        assert all(source.num_sent <= 3 for source in sources)

    asyncio.run(main())
