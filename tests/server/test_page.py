"""The live page's files: what is served, to whom, and under which rules. See test_live_page.py."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest

from tests.server.client import send
from tests.server.conftest import Server, serve

FILES = sorted(path.name for path in (resources.files("rawpaged.server") / "page").iterdir())
PATHS = ["/", *(f"/page/{name}" for name in FILES if name != "index.html")]
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}


@pytest.mark.parametrize("path", PATHS)
def test_files(server: Server, path: str) -> None:
    answer = send(server.url, "GET", path)
    name = "index.html" if path == "/" else path.removeprefix("/page/")
    assert answer.status == 200
    assert answer.body == (resources.files("rawpaged.server") / "page" / name).read_bytes()
    assert answer.headers["Content-Type"].split(";")[0] == TYPES[name.split(".")[-1]]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-cache"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    again = send(server.url, "GET", path, headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["ETag"] == answer.headers["ETag"]
    assert send(server.url, "GET", path, headers={"If-None-Match": '"other"'}).status == 200
    assert send(server.url, "HEAD", path).status == 200
    assert send(server.url, "POST", path).status == 405


def test_everything_named_is_there_and_nothing_is_elsewhere(server: Server) -> None:
    named = set()
    for name in FILES:
        text = (resources.files("rawpaged.server") / "page" / name).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|style=)", text), name
        named |= set(re.findall(r'"\./([\w.]+)"', text))
        named |= set(re.findall(r'"page/([\w.]+)"', text))
    assert named - {"server.json"} == set(FILES) - {"index.html"}


@pytest.mark.parametrize(
    "path",
    ["/page", "/page/", "/page/no.js", "/page/../page.py", "/page/%2e%2e/page.py", "/index.html"],
)
def test_nothing_else(server: Server, path: str) -> None:
    assert send(server.url, "GET", path).status == 404


@pytest.mark.parametrize(
    ("options", "kv", "api_key"),
    [
        ({}, False, False),
        ({"enable_admin_routes": True}, True, False),
        ({"enable_admin_routes": True, "api_key": "secret"}, True, True),
    ],
)
def test_what_the_page_asks_first(options: dict[str, Any], kv: bool, api_key: bool) -> None:
    """Without a key, and without anything that a key would guard."""
    with serve(**options) as server:
        answer = send(server.url, "GET", "/page/server.json")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.json.pop("started") > 1.7e9
        told = answer.json
        told.pop("started")
        assert told == {"model": "fake", "kv": kv, "api_key": api_key}


def test_the_api_key_does_not_guard_the_page() -> None:
    with serve(api_key="secret", enable_admin_routes=True) as server:
        for path in PATHS:
            assert send(server.url, "GET", path).status == 200
        for path in ("/kv", "/page/no.js", "/page/../kv", "//", "/page/"):
            assert send(server.url, "GET", path).status == 401
