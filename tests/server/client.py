"""The least of an HTTP client: no checks of its own, so that tests can send anything."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPMessage
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails unless the body is exactly that."""
        body = self.json
        assert list(body) == ["error"], body
        error: dict[str, Any] = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, `[DONE]` as that string; fails on anything between them."""
        events = []
        for block in self.body.decode().split("\n\n"):
            if not block:
                continue
            assert block.startswith("data: ")
            data = block.removeprefix("data: ")
            assert "\n" not in data
            events.append(data if data == "[DONE]" else json.loads(data))
        return events


def send(
    url: str,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own; a dict goes as JSON."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


def complete(url: str, **body: Any) -> Answer:
    """POST /v1/completions with a prompt unless one is given."""
    return send(url, "POST", "/v1/completions", {"model": "fake", "prompt": "hello", **body})


def chat(url: str, **body: Any) -> Answer:
    """POST /v1/chat/completions with a message unless some are given."""
    messages = [{"role": "user", "content": "hi"}]
    return send(
        url, "POST", "/v1/chat/completions", {"model": "fake", "messages": messages, **body}
    )
