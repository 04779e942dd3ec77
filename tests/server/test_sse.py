from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from aiohttp import web

from rawpaged.errors import RequestFailedError
from rawpaged.server.sse import encode_event
from tests.server.client import Answer, send
from tests.server.conftest import serve
from tests.server.fake_engine import FakeEngine


class Event(msgspec.Struct):
    text: str


def test_an_event_is_one_line_however_lines_are_split() -> None:
    text = "".join(map(chr, [*range(0x100), 0x2028, 0x2029, 0x1F600]))
    data = encode_event(Event(text)).decode()
    assert data.endswith("\n\n")
    assert len(data.removesuffix("\n\n").splitlines()) == 1
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def answers(num_at_once: int, path: str, body: dict[str, Any]) -> tuple[list[Any], int]:
    """The events of a stream, and the writes that it took before the last."""
    engine = FakeEngine()
    engine.num_at_once = num_at_once
    engine.failure, engine.fail_after = RequestFailedError("broken"), 12
    write, num_writes = web.StreamResponse.write, 0

    async def counted(response: web.StreamResponse, data: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        await write(response, data)

    with serve(engine) as server, patch.object(web.StreamResponse, "write", counted):
        answer: Answer = send(server.url, "POST", path, {**body, "stream": True})
    assert answer.status == 200
    return [_without_names(event) for event in answer.events], num_writes


def _without_names(event: Any) -> Any:
    if isinstance(event, str):
        return event
    return {key: value for key, value in event.items() if key not in ("id", "created")}


@pytest.mark.parametrize("max_tokens", [10, 20])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "n": 2, "logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt": "hello", "stream_options": {"include_usage": True}}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "n": 2,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
    ],
)
def test_events_that_come_together_are_the_same_in_fewer_writes(
    path: str, body: dict[str, Any], max_tokens: int
) -> None:
    """Also when the request fails after the twelfth token."""
    body = {**body, "max_tokens": max_tokens}
    one_by_one, num_writes = answers(1, path, body)
    together, num_joined = answers(4, path, body)
    assert together == one_by_one
    assert (one_by_one[-1] == "[DONE]") == (max_tokens == 10)
    num_tokens = min(max_tokens, 12)
    num_usages = max_tokens == 10 and "stream_options" in body
    assert num_writes == num_tokens + num_usages
    assert num_joined == (num_tokens + 3) // 4 + num_usages
