"""Sleeping over HTTP: behind the admin flag, with a model that really sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from rawpaged import AsyncEngine
from rawpaged.errors import BackendError
from tests.server.client import complete, send
from tests.server.conftest import Server, serve
from tests.tiny import engine_of, tiny_config

ROUTES = (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"))


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine(tiny_config()) as engine:
        yield engine


@pytest.fixture
def server(engine: AsyncEngine) -> Iterator[Server]:
    with serve(cast(Any, engine), enable_admin_routes=True) as server:
        yield server
        assert send(server.url, "POST", "/wake_up").status == 200


def is_sleeping(server: Server) -> bool:
    body = send(server.url, "GET", "/is_sleeping").json
    assert list(body) == ["is_sleeping"]
    return bool(body["is_sleeping"])


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_off_by_default(method: str, route: str) -> None:
    with serve() as server:
        answer = send(server.url, method, route)
        assert answer.status == 404
        assert "--enable-admin-routes" in answer.error["message"]


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_the_api_key_guards(engine: AsyncEngine, method: str, route: str) -> None:
    with serve(cast(Any, engine), enable_admin_routes=True, api_key="key") as server:
        assert send(server.url, method, route).status == 401
    assert not engine.is_sleeping


@pytest.mark.parametrize("query", ["", "?level=1", "?level=2"])
def test_asleep_and_awake(server: Server, query: str) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 3}
    before = complete(server.url, **asked).json
    slept = send(server.url, "POST", f"/sleep{query}")
    assert (slept.status, slept.json) == (200, {"is_sleeping": True})
    assert is_sleeping(server)
    for stream in (False, True):
        refused = complete(server.url, **asked, stream=stream)
        assert refused.status == 503
        assert refused.error["code"] == "sleeping"
        assert "/wake_up" in refused.error["message"]
    health = send(server.url, "GET", "/health")
    assert (health.status, health.json) == (200, {"status": "sleeping"})
    assert send(server.url, "GET", "/metrics").status == 200
    woken = send(server.url, "POST", "/wake_up")
    assert (woken.status, woken.json) == (200, {"is_sleeping": False})
    assert not is_sleeping(server)
    assert send(server.url, "GET", "/health").json == {"status": "ok"}
    assert complete(server.url, **asked).json["choices"] == before["choices"]


def test_requests_keep_it_awake(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that runs is finished, not lost."""
    engine: Any = server.engine
    step = engine_of(engine).step
    answers: list[Any] = []

    def step_with_a_client() -> Any:
        if not answers:
            answers.append(engine._thread.sleep(1))
        return step()

    monkeypatch.setattr(engine_of(engine), "step", step_with_a_client)
    done = complete(server.url, prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)
    assert done.json["usage"]["completion_tokens"] == 4
    assert "1 request running" in str(answers[0].exception(5))
    assert not is_sleeping(server)


def test_a_conflict_is_409(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(cast(Any, server.engine))
    monkeypatch.setitem(engine._requests, "some", cast(Any, None))
    answer = send(server.url, "POST", "/sleep")
    assert (answer.status, answer.error["code"]) == (409, "sleep_conflict")
    monkeypatch.undo()


def test_waking_up_fails(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BackendError("no memory")

    engine = engine_of(cast(Any, server.engine))
    assert send(server.url, "POST", "/sleep").status == 200
    monkeypatch.setattr(engine, "wake_up", fail)
    answer = send(server.url, "POST", "/wake_up")
    assert (answer.status, answer.error["code"]) == (500, "wake_up_failed")
    assert "no memory" in answer.error["message"]
    monkeypatch.undo()
    assert is_sleeping(server)


@pytest.mark.parametrize(
    ("method", "route", "param"),
    [
        ("POST", "/sleep?level=0", "level"),
        ("POST", "/sleep?level=1&level=2", "level"),
        ("POST", "/sleep?level=", "level"),
        ("POST", "/sleep?level=%201", "level"),
        ("POST", "/sleep?mode=abort", "mode"),
        ("POST", "/wake_up?tags=weights", "tags"),
        ("GET", "/is_sleeping?x", "x"),
    ],
)
def test_queries_that_are_not_known(server: Server, method: str, route: str, param: str) -> None:
    answer = send(server.url, method, route)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert not is_sleeping(server)


def test_bodies_are_refused(server: Server) -> None:
    answer = send(server.url, "POST", "/sleep", {"level": 2})
    assert answer.status == 400
    assert "?level=" in answer.error["message"]
    assert not is_sleeping(server)


def test_methods(server: Server) -> None:
    for method, route in ROUTES:
        assert send(server.url, "GET" if method == "POST" else "POST", route).status == 405
