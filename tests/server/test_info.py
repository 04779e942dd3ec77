from __future__ import annotations

from typing import Any

import pytest

import rawpaged
from rawpaged.errors import ConfigError
from rawpaged.server.app import create_app
from rawpaged.server.metrics import PrometheusStats
from tests.server.client import send
from tests.server.conftest import Server, serve
from tests.server.fake_engine import FakeEngine


def test_models() -> None:
    with serve(served_model_names=["a", "org/b"]) as server:
        models = send(server.url, "GET", "/v1/models").json
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == ["a", "org/b"]
        for path in ("/v1/models/org/b", "/v1/models/org%2Fb"):
            model = send(server.url, "GET", path).json
            assert model == models["data"][1]
        assert model["object"] == "model"
        assert model["max_model_len"] == 256
        assert model["root"] == "fake/model"
        answer = send(server.url, "GET", "/v1/models/c")
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"


@pytest.mark.parametrize("names", [[], [""]])
def test_a_model_needs_a_name(names: Any) -> None:
    with pytest.raises(ConfigError):
        create_app(
            FakeEngine(),  # type: ignore[arg-type]
            served_model_names=names,
            stats=PrometheusStats("fake"),
        )


def test_version(server: Server) -> None:
    assert send(server.url, "GET", "/version").json == {"version": rawpaged.__version__}


def test_health_follows_the_engine() -> None:
    with serve() as server:
        assert send(server.url, "GET", "/health").status == 200
        assert send(server.url, "HEAD", "/health").status == 200
        server.engine.close()
        assert send(server.url, "GET", "/health").status == 503
