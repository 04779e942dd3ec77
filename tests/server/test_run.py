"""Start and end of a server process."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from rawpaged.errors import ConfigError, EngineClosedError
from rawpaged.server.app import create_app
from rawpaged.server.metrics import PrometheusStats
from rawpaged.server.run import run_server
from tests.server.client import Answer, complete, send
from tests.server.conftest import Server, serve
from tests.server.fake_engine import FakeEngine

SCRIPT = Path(__file__).with_name("serve_fake.py")


@contextmanager
def process(shutdown_timeout: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT), "0", str(shutdown_timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            if not url:
                pytest.fail(child.communicate()[1])
            yield child, url
        finally:
            child.kill()


def start(pool: ThreadPoolExecutor, url: str, **body: Any) -> Future[Answer]:
    """Send a completion from a thread and wait until it can have arrived."""
    future = pool.submit(complete, url, **body)
    time.sleep(0.3)
    return future


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle_server_ends_at_once(number: signal.Signals) -> None:
    with process(30) as (child, _):
        child.send_signal(number)
        out, err = child.communicate(timeout=5)
        assert (child.returncode, out, err) == (0, "0 aborted, 0 finished\n", "")


def test_the_server_ends_with_its_engine() -> None:
    engine = FakeEngine()

    def die(url: str) -> None:
        engine.is_running = False

    app = create_app(
        cast(Any, engine), served_model_names=["fake"], stats=PrometheusStats("fake")
    )
    with pytest.raises(EngineClosedError, match="has died"):
        run_server(app, host="127.0.0.1", port=0, on_ready=die)


def test_running_requests_may_end() -> None:
    with process(30) as (child, url), ThreadPoolExecutor() as pool:
        stream = start(pool, url, max_tokens=30, stream=True)
        child.terminate()
        time.sleep(0.2)
        refused = complete(url)
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert "shutting down" in refused.error["message"]
        assert send(url, "GET", "/health").status == 503
        events = stream.result().events
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        out, _ = child.communicate(timeout=5)
        assert (child.returncode, out) == (0, "0 aborted, 1 finished\n")


@pytest.mark.parametrize("hurry", [False, True])
def test_the_rest_is_aborted_in_order(hurry: bool) -> None:
    with process(30 if hurry else 0.2) as (child, url), ThreadPoolExecutor() as pool:
        stream = pool.submit(complete, url, prompt=["a", "b"], max_tokens=200, stream=True)
        plain = start(pool, url, max_tokens=200)
        child.terminate()
        if hurry:
            time.sleep(0.2)
            child.terminate()
        events = stream.result(timeout=5).events
        assert events[-1] == "[DONE]"
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
        assert reasons.count("abort") == 2
        [choice] = plain.result(timeout=5).json["choices"]
        assert choice["finish_reason"] == "abort"
        assert choice["text"]
        child.communicate(timeout=5)
        assert child.returncode == 0


def test_a_client_that_does_not_read_cannot_stop_the_end() -> None:
    engine = FakeEngine(max_model_len=10**6)
    started = time.monotonic()
    with serve(engine, shutdown_timeout=0.1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            body = b'{"prompt": "a", "max_tokens": 900000, "stream": true}'
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            time.sleep(0.5)
            assert engine.live
            server.stop()
            while engine.live and time.monotonic() < started + 15:
                time.sleep(0.05)
    assert not engine.live
    assert time.monotonic() - started < 15


def run(host: str, port: int) -> None:
    app = create_app(
        FakeEngine(),  # type: ignore[arg-type]
        served_model_names=["fake"],
        stats=PrometheusStats("fake"),
    )
    run_server(app, host=host, port=port, on_ready=lambda _: pytest.fail("it listens"))


def test_port_in_use() -> None:
    former = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            run("127.0.0.1", port)
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 0)])
def test_unusable_address(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}"):
        run(host, port)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\x01b\r\n\r\n", "header"),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "malformed HTTP"),
        (b"\x16\x03\x01\x02\x00secret\r\n\r\n", "malformed HTTP"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: secret\x00\r\n\r\n", "header"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", "malformed HTTP"),
    ],
)
def test_malformed_http_is_one_short_line_of_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, sent: bytes, reason: str
) -> None:
    caplog.set_level(logging.DEBUG)
    head, body = exchange(server, sent)
    assert head.startswith(b"HTTP/1.0 400 ")
    assert b"\r\nServer: rawpaged\r\n" in head
    error = json.loads(body)["error"]
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"
    [record] = [r for r in caplog.records if r.name not in ("asyncio", "rawpaged.server.access")]
    assert (record.name, record.levelno) == ("rawpaged.server.connection", logging.INFO)
    assert record.exc_info is None
    line = record.getMessage()
    assert line.startswith("refused malformed HTTP from 127.0.0.1: ")
    assert len(line) < 250
    assert "\n" not in line
    assert "secret" not in line


def test_unknown_expectation(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    head, _ = exchange(
        server, b"GET /version HTTP/1.1\r\nHost: a\r\nExpect: a\r\nConnection: close\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 417 ")
    assert b"\r\nServer: rawpaged\r\n" in head
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def exchange(server: Server, sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head + b"\r\n", body
