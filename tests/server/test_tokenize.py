from __future__ import annotations

from typing import Any

import pytest

from tests.server.client import Answer, send
from tests.server.conftest import Server, serve
from tests.server.fake_engine import BOS, FakeEngine

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
