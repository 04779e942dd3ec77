"""Profiles over HTTP: off unless asked for, one at a time, files only where they may be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rawpaged import AsyncEngine
from rawpaged.engine.op_recording import read_recording
from rawpaged.errors import ConfigError
from rawpaged.server.profiling import prepare_profiler_dir
from tests.server.client import complete, send
from tests.server.conftest import Server, serve
from tests.tiny import tiny_config

ROUTES = ("/start_profile", "/stop_profile")
FILE_NAME = re.compile(r"profile-\d{8}-\d{6}-[0-9a-f]{8}\.json")


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine(tiny_config()) as engine:
        yield engine


@pytest.fixture
def profiled(engine: AsyncEngine, tmp_path: Path) -> Iterator[Server]:
    """A server that writes traces to `tmp_path`."""
    with serve(cast(Any, engine), profiler_dir=tmp_path) as server:
        yield server


def generate(server: Server, max_tokens: int) -> None:
    answer = complete(server.url, prompt=[5, 6, 7], max_tokens=max_tokens, ignore_eos=True)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("route", ROUTES)
def test_off_by_default(route: str) -> None:
    with serve() as server:
        answer = send(server.url, "POST", route)
        assert answer.status == 404
        assert "--profiler-dir" in answer.error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_the_api_key_guards(engine: AsyncEngine, tmp_path: Path, route: str) -> None:
    with serve(cast(Any, engine), profiler_dir=tmp_path, api_key="key") as server:
        assert send(server.url, "POST", route).status == 401
        assert send(server.url, "POST", route, headers={"Authorization": "Bearer no"}).status == 401
    assert not list(tmp_path.iterdir())


def test_start_and_stop(profiled: Server, tmp_path: Path) -> None:
    started = send(profiled.url, "POST", "/start_profile").json
    assert set(started) == {"file", "ops_file", "first_step", "num_steps"}
    assert started["ops_file"] is None
    assert FILE_NAME.fullmatch(started["file"])
    assert started["num_steps"] is None
    generate(profiled, max_tokens=4)
    stopped = send(profiled.url, "POST", "/stop_profile", b"{}").json
    assert (stopped["file"], stopped["num_steps"]) == (started["file"], 4)
    assert stopped["first_step"] == started["first_step"]
    assert not stopped["is_truncated"]
    assert [path.name for path in tmp_path.iterdir()] == [started["file"]]
    events = json.loads((tmp_path / started["file"]).read_text())["traceEvents"]
    assert len(events) == stopped["num_ranges"] + 2
    assert sum(event.get("cat") == "step" for event in events) == 4


def test_a_number_of_steps(profiled: Server, tmp_path: Path) -> None:
    started = send(profiled.url, "POST", "/start_profile", {"num_steps": 3}).json
    assert started["num_steps"] == 3
    generate(profiled, max_tokens=9)
    # It has ended and is written without a stop, which then tells of it, once.
    assert [path.name for path in tmp_path.iterdir()] == [started["file"]]
    stopped = send(profiled.url, "POST", "/stop_profile").json
    assert (stopped["file"], stopped["num_steps"]) == (started["file"], 3)
    assert send(profiled.url, "POST", "/stop_profile").status == 409


def test_ops_are_recorded_on_request(profiled: Server, tmp_path: Path) -> None:
    wanted = {"num_steps": 2, "record_ops": True}
    started = send(profiled.url, "POST", "/start_profile", wanted).json
    assert started["ops_file"] == started["file"].replace("profile-", "ops-")
    generate(profiled, max_tokens=4)
    stopped = send(profiled.url, "POST", "/stop_profile").json
    assert stopped["ops_file"] == started["ops_file"]
    assert {path.name for path in tmp_path.iterdir()} == {started["file"], started["ops_file"]}
    recording = read_recording(tmp_path / started["ops_file"])
    assert len(recording.steps) == 2


def test_stop_without_start(profiled: Server) -> None:
    answer = send(profiled.url, "POST", "/stop_profile")
    assert answer.status == 409
    assert answer.error["code"] == "profile_conflict"


def test_start_twice(profiled: Server, tmp_path: Path) -> None:
    assert send(profiled.url, "POST", "/start_profile").status == 200
    answer = send(profiled.url, "POST", "/start_profile", {"num_steps": 1})
    assert answer.status == 409
    assert answer.error["code"] == "profile_conflict"
    stopped = send(profiled.url, "POST", "/stop_profile").json
    assert (stopped["file"], stopped["num_steps"], stopped["num_ranges"]) == (None, 0, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/start_profile", b'{"num_steps": 0}', "num_steps"),
        ("/start_profile", b'{"num_steps": "3"}', "num_steps"),
        ("/start_profile", b'{"path": "/etc/passwd"}', "path"),
        ("/start_profile", b'{"record_ops": "../x"}', "record_ops"),
        ("/start_profile", b'{"file": "../x"}', "file"),
        ("/start_profile", b"[]", None),
        ("/stop_profile", b'{"num_steps": 1}', "num_steps"),
        ("/start_profile?num_steps=3", b"", None),
        ("/start_profile?output=../x", b"", None),
    ],
)
def test_refused(profiled: Server, tmp_path: Path, route: str, body: bytes, param: str) -> None:
    """No field names a file, and nothing is started."""
    answer = send(profiled.url, "POST", route, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert send(profiled.url, "POST", "/stop_profile").status == 409
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["/start_profile/../x", "/start_profile/%2e%2e%2fx"])
def test_paths_name_no_file(profiled: Server, tmp_path: Path, path: str) -> None:
    assert send(profiled.url, "POST", path).status == 404
    assert not list(tmp_path.iterdir())


def test_only_post(profiled: Server) -> None:
    for route in ROUTES:
        assert send(profiled.url, "GET", route).status == 405


def test_a_directory_that_is_gone(engine: AsyncEngine, tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    directory.mkdir()
    with serve(cast(Any, engine), profiler_dir=directory) as server:
        assert send(server.url, "POST", "/start_profile").status == 200
        directory.rmdir()
        generate(server, max_tokens=2)
        answer = send(server.url, "POST", "/stop_profile")
        assert answer.status == 500
        assert answer.error["code"] == "trace_file"
        assert str(tmp_path) not in answer.error["message"]
        generate(server, max_tokens=2)
        assert send(server.url, "POST", "/stop_profile").status == 409


def test_prepare_profiler_dir(tmp_path: Path) -> None:
    directory = prepare_profiler_dir(str(tmp_path / "a" / "b"))
    assert directory == tmp_path / "a" / "b"
    assert not list(directory.iterdir())
    assert prepare_profiler_dir(str(directory)) == directory
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="profiler_dir"):
        prepare_profiler_dir(str(tmp_path / "file"))
