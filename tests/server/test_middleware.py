from __future__ import annotations

import logging
import socket

import openai
import pytest

from rawpaged.errors import ConfigError, EngineClosedError
from rawpaged.server import body
from rawpaged.server.app import create_app
from rawpaged.server.metrics import PrometheusStats
from tests.server.client import chat, complete, send
from tests.server.conftest import Server, serve
from tests.server.fake_engine import FakeEngine

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/version"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nothing/here"),
]


@pytest.mark.parametrize("path", ["/page", "/v1", "/v1/completion", "/v1/completions/", "//health"])
def test_unknown_route(server: Server, path: str) -> None:
    answer = send(server.url, "GET", path)
    assert answer.status == 404
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"] == f"there is no route GET {path}"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/health", "GET,HEAD"),
        ("DELETE", "/v1/models/fake", "GET,HEAD"),
    ],
)
def test_wrong_method(server: Server, method: str, path: str, allowed: str) -> None:
    answer = send(server.url, method, path)
    assert answer.status == 405
    assert answer.headers["Allow"] == allowed
    assert answer.error["message"] == (
        f"there is no route {method} {path}; the path takes {allowed.replace(',', ', ')}"
    )


def test_unknown_model_lists_the_served_ones() -> None:
    with serve(served_model_names=["a", "org/b"]) as server:
        answer = complete(server.url, model="c")
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
        assert answer.error["param"] == "model"
        assert "'a', 'org/b'" in answer.error["message"]
        assert complete(server.url, model="org/b").json["model"] == "org/b"
        assert complete(server.url, model=None).json["model"] == "a"
        assert chat(server.url, model="c").status == 404


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_type_does_not_matter(server: Server, content_type: str) -> None:
    answer = send(
        server.url,
        "POST",
        "/v1/completions",
        b'{"model": "fake", "prompt": "a"}',
        {"Content-Type": content_type},
    )
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"


def test_body_over_the_limit() -> None:
    with serve(max_body_bytes=1000) as server:
        assert complete(server.url, prompt="a" * 200).status == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = send(server.url, "POST", path, b" " * 1001)
            assert answer.status == 413
            assert "1000 bytes" in answer.error["message"]


def test_chunked_body_over_the_limit() -> None:
    with serve(max_body_bytes=1000) as server:
        chunks = b"".join(b"3e8\r\n%b\r\n" % (b" " * 1000) for _ in range(3)) + b"0\r\n\r\n"
        answer = send(
            server.url, "POST", "/v1/completions", chunks, {"Transfer-Encoding": "chunked"}
        )
        assert answer.status == 413
        assert answer.error["message"]


def test_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_SECONDS", 0.1)
    with serve() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            )
            assert connection.recv(12) == b"HTTP/1.1 408"


def test_compressed_body(server: Server) -> None:
    answer = send(
        server.url, "POST", "/v1/completions", b"\x1f\x8bnonsense", {"Content-Encoding": "gzip"}
    )
    assert answer.status == 415
    assert "gzip" in answer.error["message"]


def test_api_key() -> None:
    with serve(api_key="secret") as server:
        for method, path in ROUTES:
            for header in (None, "secret", "Bearer", "Bearer wrong", "Basic secret", "Bearer \xe9"):
                headers = {} if header is None else {"Authorization": header}
                answer = send(server.url, method, path, headers=headers)
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert answer.error["code"] == "invalid_api_key"
                assert "secret" not in answer.error["message"]
            answer = send(server.url, method, path, headers={"Authorization": "Bearer secret"})
            assert answer.status in (200, 400, 404)
        for path in ("/health", "/metrics"):
            assert send(server.url, "GET", path).status == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "fake"
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="other") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.parametrize("api_key", ["", " a", "a\n", "é"])
def test_unusable_api_key(api_key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        create_app(
            FakeEngine(),  # type: ignore[arg-type]
            served_model_names=["fake"],
            stats=PrometheusStats("fake"),
            api_key=api_key,
        )


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-1.2_3:4", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("a b", False),
        ("a;b", False),
        ("\xe9", False),
    ],
)
def test_request_id_header(server: Server, sent: str, kept: bool) -> None:
    answer = send(server.url, "GET", "/version", headers={"X-Request-Id": sent})
    assert (answer.headers["X-Request-Id"] == sent) is kept
    assert answer.headers["X-Request-Id"]


def test_request_id_names_the_answer(server: Server) -> None:
    answer = complete(server.url, request_id="mine")
    assert answer.headers["X-Request-Id"] == "mine"
    assert answer.json["id"] == "cmpl-mine"
    stream = chat(server.url, request_id="mine", stream=True)
    assert stream.headers["X-Request-Id"] == "mine"
    assert stream.events[0]["id"] == "chatcmpl-mine"
    assert complete(server.url).headers["X-Request-Id"] != "mine"


def test_access_log_tells_what_happened_and_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rawpaged.server.access")
    with serve(api_key="secret") as server:
        sent = {"model": "fake", "prompt": "confidential", "user": "a\nb", "request_id": "mine"}
        headers = {"Authorization": "Bearer secret"}
        send(server.url, "POST", "/v1/completions", sent, headers)
        send(server.url, "GET", "/a%0Ab?key=secret", headers=headers)
    first, second = [r.getMessage() for r in caplog.records if r.name == "rawpaged.server.access"]
    assert first.startswith("POST /v1/completions 200 ")
    assert first.endswith("id=mine user='a\\nb'")
    assert second.startswith("GET /a%0Ab 404 ")
    for line in (first, second):
        assert "\n" not in line
        assert "secret" not in line
        assert "confidential" not in line


def test_unexpected_error_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.failure = ZeroDivisionError("internal detail")
    with serve(engine) as server:
        answer = complete(server.url)
        assert answer.status == 500
        assert answer.error["message"] == "internal server error"
        assert answer.error["type"] == "server_error"
    [record] = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


def test_closed_engine() -> None:
    engine = FakeEngine()
    with serve(engine) as server:
        engine.failure = EngineClosedError("the engine is closed")
        answer = complete(server.url)
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) > 0
        engine.close()
        assert int(send(server.url, "GET", "/health").headers["Retry-After"]) > 0
        for answer in (complete(server.url), chat(server.url, stream=True)):
            assert answer.status == 503
            assert answer.error["code"] == "service_unavailable"


@pytest.mark.parametrize("path", ["/version", "/nothing/here", "/health"])
def test_server_header_tells_no_versions(server: Server, path: str) -> None:
    assert send(server.url, "GET", path).headers.get_all("Server") == ["rawpaged"]
    stream = complete(server.url, stream=True)
    assert stream.headers.get_all("Server") == ["rawpaged"]


def test_probes_are_logged_for_debugging_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rawpaged.server.access")
    engine = FakeEngine()
    with serve(engine) as server:
        send(server.url, "GET", "/health")
        send(server.url, "GET", "/metrics")
        engine.close()
        send(server.url, "GET", "/health")
        send(server.url, "GET", "/version")
    # The line of a stream that an earlier test has read may come only now.
    records = [r for r in caplog.records if r.getMessage().startswith("GET /")]
    levels = [(r.getMessage()[:16].rstrip(), r.levelname) for r in records]
    assert levels == [
        ("GET /health 200", "DEBUG"),
        ("GET /metrics 200", "DEBUG"),
        ("GET /health 503", "INFO"),
        ("GET /version 200", "INFO"),
    ]
