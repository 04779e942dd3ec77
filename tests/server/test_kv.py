"""GET /kv: off unless asked for, agrees with the pool, tells no text."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from rawpaged import AsyncEngine
from rawpaged.engine.block_map import make_block_map
from rawpaged.scheduler.pool_snapshot import PoolSnapshot, RequestBlocks
from rawpaged.server.kv import MAX_BLOCKS
from tests.server.client import complete, send
from tests.server.conftest import Server, serve
from tests.tiny import engine_of, tiny_config, wait_until

PROMPT = [5, 6, 7, 8] * 10


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine(tiny_config()) as engine:
        yield engine


@pytest.fixture(scope="module")
def admin(engine: AsyncEngine) -> Iterator[Server]:
    with serve(cast(Any, engine), enable_admin_routes=True) as server:
        yield server


def test_off_by_default(engine: AsyncEngine) -> None:
    with serve(cast(Any, engine)) as server:
        answer = send(server.url, "GET", "/kv")
        assert answer.status == 404
        assert "--enable-admin-routes" in answer.error["message"]


def test_the_api_key_guards(engine: AsyncEngine) -> None:
    with serve(cast(Any, engine), enable_admin_routes=True, api_key="key") as server:
        assert send(server.url, "GET", "/kv").status == 401
        assert send(server.url, "GET", "/kv", headers={"Authorization": "Bearer no"}).status == 401
        headers = {"Authorization": "Bearer key"}
        assert send(server.url, "GET", "/kv", headers=headers).status == 200


def test_an_idle_pool_with_cached_blocks(admin: Server, engine: AsyncEngine) -> None:
    assert complete(admin.url, prompt=PROMPT, max_tokens=2, ignore_eos=True).status == 200
    answer = send(admin.url, "GET", "/kv")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    body = answer.json
    assert set(body) == {
        "step", "num_blocks", "block_size", "first_block", "next_block", "num_waiting",
        "requests", "owners", "runs", "regions",
    }  # fmt: skip
    assert (body["num_blocks"], body["block_size"]) == (128, 16)
    assert (body["first_block"], body["next_block"]) == (0, 128)
    assert (body["requests"], body["owners"], body["num_waiting"]) == ([], [[]], 0)
    cached = [run for run in body["runs"] if run["is_cached"]]
    assert sum(run["num_blocks"] for run in cached) == 2
    for run in body["runs"]:
        assert (run["owners"], run["ref_count"], run["num_tokens"]) == (0, 0, 0)
    pool = engine_of(engine).scheduler.kv_cache_manager.block_pool
    for run in cached:
        for block_id in range(run["first_block"], run["first_block"] + run["num_blocks"]):
            assert pool.block_hash(block_id) is not None


def test_under_load(admin: Server, engine: AsyncEngine) -> None:
    """Three samples of one prompt; their ids, and neither tokens nor text."""
    body = {
        "prompt": PROMPT, "n": 3, "max_tokens": 216, "ignore_eos": True, "seed": 3,
        "request_id": "mine", "return_token_ids": True,
    }  # fmt: skip
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(admin.url, **body)))
    thread.start()
    seen: list[dict[str, Any]] = []

    def sees_all_three() -> bool:
        seen.append(send(admin.url, "GET", "/kv").json)
        return len(seen[-1]["requests"]) == 3 or not thread.is_alive()

    wait_until(sees_all_three, 20)
    thread.join()
    block_map = seen[-1]
    names = sorted(request["request_id"] for request in block_map["requests"])
    assert [name[:2] for name in names] == ["0:", "1:", "2:"]
    assert all("mine" in name for name in names)
    for request in block_map["requests"]:
        assert request["num_prompt_tokens"] == len(PROMPT)
        assert all(isinstance(value, int) for key, value in request.items() if key != "request_id")
    for index, request in enumerate(block_map["requests"]):
        held = sum(
            run["num_blocks"] for run in block_map["runs"]
            if index in block_map["owners"][run["owners"]]
        )  # fmt: skip
        assert held == request["num_blocks"] == -(-request["num_computed_tokens"] // 16)
    assert [choice["finish_reason"] for choice in answers[0].json["choices"]] == ["length"] * 3


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?first_block=10&num_blocks=5", (10, 15)),
        ("?first_block=120", (120, 128)),
        ("?num_blocks=16384", (0, 128)),
        ("?first_block=127&num_blocks=1", (127, 128)),
    ],
)
def test_parts(admin: Server, query: str, expected: tuple[int, int]) -> None:
    body = send(admin.url, "GET", f"/kv{query}").json
    assert (body["first_block"], body["next_block"]) == expected
    assert sum(run["num_blocks"] for run in body["runs"]) == expected[1] - expected[0]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?first_block=128", "first_block"),
        ("?first_block=-1", "first_block"),
        ("?first_block=%201", "first_block"),
        ("?first_block=1_0", "first_block"),
        ("?first_block=%D9%A1", "first_block"),
        ("?first_block=1&first_block=2", "first_block"),
        (f"?first_block={'9' * 5000}", "first_block"),
        ("?num_blocks=0", "num_blocks"),
        ("?num_blocks=16385", "num_blocks"),
        ("?num_blocks=", "num_blocks"),
        ("?request_id=a", "request_id"),
    ],
)
def test_refused(admin: Server, query: str, param: str) -> None:
    answer = send(admin.url, "GET", f"/kv{query}")
    assert answer.status == 400
    assert answer.error["param"] == param
    assert len(answer.body) < 500


def test_only_get(admin: Server) -> None:
    assert send(admin.url, "POST", "/kv").status == 405


def test_a_closed_engine() -> None:
    with (
        AsyncEngine(tiny_config()) as engine,
        serve(cast(Any, engine), enable_admin_routes=True) as server,
    ):
        engine.close()
        answer = send(server.url, "GET", "/kv")
        assert answer.status == 503
        assert answer.error["code"] == "service_unavailable"


def test_it_is_no_line_in_the_log(admin: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rawpaged.server.access")
    send(admin.url, "GET", "/kv")
    send(admin.url, "GET", "/kv?num_blocks=0")
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("GET /kv")]
    assert len(lines) == 1
    assert lines[0].startswith("GET /kv 400")


def test_the_worst_answer_is_bounded() -> None:
    """No two neighbours alike, every block with a set of owners of its own."""
    num_blocks, num_requests = 100_000, 256
    requests = tuple(
        RequestBlocks(
            request_id=f"{index}:cmpl-{'f' * 128}",
            num_prompt_tokens=2**20,
            num_tokens=2**20,
            num_computed_tokens=2**20,
            num_cached_tokens=2**20,
            num_preemptions=1,
            block_table=tuple(range(index, num_blocks, num_requests)),
        )
        for index in range(num_requests)
    )
    snapshot = PoolSnapshot(
        num_blocks=num_blocks,
        block_size=16,
        num_waiting=0,
        requests=requests,
        published_blocks=list(range(0, num_blocks, 2)),
    )
    block_map = make_block_map(
        snapshot, step=10**9, first_block=num_blocks - MAX_BLOCKS, num_blocks=MAX_BLOCKS
    )
    assert len(block_map.runs) == MAX_BLOCKS
    assert len(msgspec.json.encode(block_map)) < 2_000_000
