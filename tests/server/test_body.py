"""Bodies whose client leaves while they are read."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from rawpaged.server.body import read_body
from rawpaged.server.context import CONTEXT
from tests.server.conftest import serve
from tests.server.fake_engine import FakeEngine
from tests.server.test_admission import post_raw
from tests.tiny import wait_until


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_is_never_lost(turns: int) -> None:
    """Whenever it comes between the body's arrival and the handler's going on."""

    async def cancel_late() -> None:
        body = asyncio.get_running_loop().create_future()

        async def read() -> bytes:
            return cast(bytes, await body)

        request = SimpleNamespace(
            headers={},
            app={CONTEXT: SimpleNamespace(max_body_bytes=10)},
            content_length=1,
            read=read,
        )
        task = asyncio.create_task(read_body(cast(Any, request)))
        await asyncio.sleep(0.01)
        body.set_result(b"x")
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert task.result() == b"x"

    asyncio.run(cancel_late())


def test_leaving_in_the_middle_of_a_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serve() as server:
        parts = urlsplit(server.url)
        client = socket.create_connection((parts.hostname, parts.port), timeout=10)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        # Without lingering the connection is reset.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait_until(lambda: any("499" in record.getMessage() for record in caplog.records))
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_breaks_is_no_error(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """As one that is found broken when something is written, before anybody is told."""
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    engine.failure = ConnectionResetError("broken")
    with serve(engine) as server:
        client = post_raw(server, "/v1/completions", {"prompt": "a", "stream": stream})
        while client.recv(1000):
            pass
        client.close()
        wait_until(lambda: any("/v1/completions" in r.getMessage() for r in caplog.records))
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []
