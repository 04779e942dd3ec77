from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rawpaged.server.prompts import INLINE_UNITS, MAX_CHAT_TEXTS
from rawpaged.server.tokenize import MAX_DETOKENIZED
from tests.server.client import Answer, chat, send
from tests.server.conftest import Server, serve
from tests.server.fake_engine import BOS, FakeEngine, FakeTokenizer

MESSAGES = [{"role": "user", "content": "a"}]


def tokenize(server: Server, **body: Any) -> Answer:
    return send(server.url, "POST", "/tokenize", body)


def detokenize(server: Server, **body: Any) -> Answer:
    return send(server.url, "POST", "/detokenize", body)


def test_text(server: Server) -> None:
    assert tokenize(server, prompt="ab", model="fake").json == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [BOS, 97, 98],
        "token_strs": None,
    }
    answer = tokenize(server, prompt="ab", add_special_tokens=False, return_token_strs=True).json
    assert answer["tokens"] == [97, 98]
    assert answer["token_strs"] == ["a", "b"]


def test_chat(server: Server) -> None:
    tokens = tokenize(server, messages=MESSAGES, continue_final_message=True).json["tokens"]
    assert detokenize(server, tokens=tokens).json == {"prompt": "<s>user:a"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": MESSAGES, "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({"prompt": "a", "foo": 1}, "foo"),
    ],
)
def test_wrong_tokenize(server: Server, body: dict[str, Any], param: str) -> None:
    answer = tokenize(server, **body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "a"}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [257]}, "tokens"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [1], "model": "other"}, "model"),
        ({"tokens": [1], "foo": 1}, "foo"),
    ],
)
def test_wrong_detokenize(server: Server, body: dict[str, Any], param: str) -> None:
    answer = detokenize(server, **body)
    assert answer.status in (400, 404)
    assert answer.error["param"] == param


def test_without_tokenizer() -> None:
    with serve(FakeEngine(has_tokenizer=False)) as server:
        assert tokenize(server, prompt="a").status == 400
        assert detokenize(server, tokens=[1]).status == 400


def test_number_of_detokenized_ids(server: Server) -> None:
    answer = detokenize(server, tokens=[97] * MAX_DETOKENIZED)
    assert answer.json == {"prompt": "a" * MAX_DETOKENIZED}
    answer = detokenize(server, tokens=[97] * (MAX_DETOKENIZED + 1))
    assert answer.status == 400
    assert answer.error["param"] == "tokens"
    assert answer.error["message"] == "tokens holds 262145 token ids, the limit is 262144"


@pytest.mark.parametrize(
    "messages",
    [
        MESSAGES * (MAX_CHAT_TEXTS + 1),
        [{"role": "user", "content": [{"type": "text", "text": ""}] * MAX_CHAT_TEXTS}, *MESSAGES],
    ],
)
def test_number_of_messages(messages: list[dict[str, Any]]) -> None:
    with serve(FakeEngine(max_model_len=100_000)) as server:
        for answer in (tokenize(server, messages=messages), chat(server.url, messages=messages)):
            assert answer.status == 400
            assert answer.error["param"] == "messages"
            assert answer.error["message"] == (
                "messages holds 2049 messages and parts, the limit is 2048"
            )
        assert tokenize(server, messages=messages[:-1]).status == 200


class GatedTokenizer(FakeTokenizer):
    """Works on anything only once the gate is open."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.gate = threading.Event()

    def encode_chat(self, *args: Any, **options: Any) -> list[int]:
        self._wait()
        return super().encode_chat(*args, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._wait()
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        self._wait()
        return super().token_text(token_id)

    def _wait(self) -> None:
        self.started.set()
        assert self.gate.wait(20)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [97] * (INLINE_UNITS + 1)}),
        ("/tokenize", {"prompt": "a" * (INLINE_UNITS + 1), "return_token_strs": True}),
        ("/tokenize", {"messages": MESSAGES * 200}),
    ],
)
def test_long_work_does_not_hold_up_others(path: str, body: dict[str, Any]) -> None:
    tokenizer = GatedTokenizer()
    engine = FakeEngine(max_model_len=100_000, tokenizer=tokenizer)
    with serve(engine) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(send, server.url, "POST", path, body)
        try:
            assert tokenizer.started.wait(20)
            assert send(server.url, "GET", "/health").status == 200
        finally:
            tokenizer.gate.set()
        assert answer.result().status == 200
