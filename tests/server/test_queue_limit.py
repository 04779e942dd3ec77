"""--max-num-queued-reqs: at most so many prompts wait, whatever runs; others are told to retry."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from rawpaged import AsyncEngine
from rawpaged.cli import main
from tests.server.client import chat, complete, send
from tests.server.conftest import serve
from tests.server.fake_engine import FakeEngine
from tests.tiny import engine_of, tiny_config, wait_until


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_queued", "prompts", "is_taken"),
    [
        (2, ["a"], True),
        (3, ["a"], False),
        (1, ["a", "b"], True),
        (2, ["a", "b"], False),
    ],
)
def test_prompts_are_counted(
    num_queued: int, prompts: list[str], is_taken: bool, stream: bool
) -> None:
    engine = FakeEngine()
    engine.num_queued = num_queued
    with serve(engine, max_num_queued_reqs=3) as server:
        answer = complete(server.url, prompt=prompts, stream=stream)
        if is_taken:
            assert answer.status == 200
            assert len(engine.calls) == len(prompts)
        else:
            assert answer.status == 503
            assert answer.error["code"] == "queue_full"
            assert "max_num_queued_reqs=3" in answer.error["message"]
            assert int(answer.headers["Retry-After"]) > 0
            assert not engine.calls


def test_more_prompts_than_may_ever_wait_are_refused_for_good() -> None:
    with serve(FakeEngine(), max_num_queued_reqs=3) as server:
        answer = complete(server.url, prompt=["a", "b", "c", "d"])
        assert answer.status == 400
        assert "4 prompts are more than max_num_queued_reqs=3" in answer.error["message"]
        assert "Retry-After" not in answer.headers


def test_chats_too_and_nothing_else() -> None:
    engine = FakeEngine()
    engine.num_queued = 3
    with serve(engine, max_num_queued_reqs=3) as server:
        assert chat(server.url).status == 503
        assert send(server.url, "GET", "/health").status == 200
        assert send(server.url, "POST", "/tokenize", {"prompt": "a"}).status == 200


def test_no_limit_by_default() -> None:
    engine = FakeEngine()
    engine.num_queued = 10**9
    with serve(engine) as server:
        assert complete(server.url).status == 200


def test_a_real_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """One runs, two wait, and the next is refused until they are gone."""
    gate = threading.Event()
    with (
        AsyncEngine(tiny_config(max_num_seqs=1)) as engine,
        serve(cast(Any, engine), max_num_queued_reqs=2) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        runner = engine_of(engine).runner
        launch_forward = runner.launch_forward

        def hold(*args: Any) -> Any:
            assert gate.wait(20)
            return launch_forward(*args)

        monkeypatch.setattr(runner, "launch_forward", hold)

        def ask(max_tokens: int) -> int:
            return complete(server.url, prompt=[5, 6, 7], n=2, max_tokens=max_tokens).status

        answers = [pool.submit(ask, 3)]
        wait_until(lambda: engine_of(engine).scheduler.num_running == 1)
        assert engine.num_queued == 0
        answers += [pool.submit(ask, 3) for _ in range(2)]
        wait_until(lambda: engine.num_queued == 2)
        assert ask(3) == 503
        gate.set()
        assert [answer.result() for answer in answers] == [200, 200, 200]
        assert engine.num_queued == 0
        assert ask(1) == 200


@pytest.mark.parametrize("value", ["0", "-1"])
def test_limits_that_make_no_sense(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model", "--max-num-queued-reqs", value]) == 1
    assert "max_num_queued_reqs=" in capsys.readouterr().err
