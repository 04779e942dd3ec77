"""The prefix cache through HTTP: turns of a chat, salts, opting out, resetting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rawpaged import AsyncEngine
from rawpaged.config import EngineConfig
from tests.server.client import chat, complete, send
from tests.server.conftest import Server, serve
from tests.tiny import engine_of, tiny_config, write_tokenizer

BLOCK_SIZE = 16
ROUTE = "/reset_prefix_cache"


def server_for(config: EngineConfig) -> Iterator[Server]:
    with (
        AsyncEngine(config) as engine,
        serve(cast(Any, engine), enable_admin_routes=True, served_model_names=["m"]) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    yield from server_for(tiny_config(tokenizer=str(tokenizer), max_model_len=512))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    yield from server_for(EngineConfig(model="smollm2-135m", max_model_len=1024))


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> None:
    for name in ("server", "smollm2"):
        if name in request.fixturenames:
            url = request.getfixturevalue(name).url
            assert send(url, "POST", ROUTE).status == 200


def cached(answer: Any) -> int:
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def ask(server: Server, prompt: list[int], **fields: Any) -> int:
    """cached_tokens of a completion."""
    fields = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    return cached(complete(server.url, model="m", prompt=prompt, **fields))


def turns(server: Server, **fields: Any) -> None:
    """The second turn finds all full blocks of the first one's question and answer."""
    messages = [{"role": "user", "content": "Tell me of the block table, and at some length."}]
    first = chat(
        server.url,
        model="m",
        messages=messages,
        max_tokens=50,
        temperature=0,
        return_token_ids=True,
        **fields,
    )
    assert cached(first) == 0
    (choice,) = first.json["choices"]
    prompt, answer = first.json["prompt_token_ids"], choice["token_ids"]
    messages += [
        {"role": "assistant", "content": choice["message"]["content"]},
        {"role": "user", "content": "And more?"},
    ]
    second = chat(
        server.url, model="m", messages=messages, max_tokens=1, return_token_ids=True, **fields
    )
    # As far as the template gives the answer the tokens that it was made of.
    again = second.json["prompt_token_ids"]
    pairs = zip(again, prompt + answer, strict=False)
    num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prompt + answer))
    assert num_equal >= len(prompt) + len(answer) - 2
    # The answer's last token was sampled and not computed.
    num_computed = min(num_equal, len(prompt) + len(answer) - 1)
    assert cached(second) == num_computed // BLOCK_SIZE * BLOCK_SIZE
    assert cached(second) > len(prompt)


@pytest.mark.model
def test_turns_of_a_chat(smollm2: Server) -> None:
    turns(smollm2)


def test_turns_of_token_ids(server: Server) -> None:
    """The same with the tiny model, whose text does not give its tokens back."""
    prompt = [(7 * i) % 320 for i in range(30)]
    first = complete(
        server.url, model="m", prompt=prompt, max_tokens=50, ignore_eos=True, return_token_ids=True
    )
    history = prompt + first.json["choices"][0]["token_ids"]
    assert ask(server, [*history, 5, 6, 7]) == (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert ask(server, history) == len(history) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("num_tokens", [31, 32, 33])
def test_a_prompt_asked_again(server: Server, num_tokens: int) -> None:
    prompt = [(11 * i) % 320 for i in range(num_tokens)]
    answers = [
        complete(server.url, model="m", prompt=prompt, max_tokens=20, temperature=0, logprobs=2)
        for _ in range(2)
    ]
    assert [cached(answer) for answer in answers] == [0, num_tokens // BLOCK_SIZE * BLOCK_SIZE]
    assert answers[0].json["choices"] == answers[1].json["choices"]


def test_salts_keep_apart(server: Server) -> None:
    prompt = list(range(3, 43))
    assert ask(server, prompt, cache_salt="a") == 0
    assert ask(server, prompt, cache_salt="b") == 0
    assert ask(server, prompt) == 0
    for salt in ("a", "b", None):
        assert ask(server, prompt, cache_salt=salt) == 32


def test_opting_out_of_reading(server: Server) -> None:
    prompt = list(range(3, 43))
    assert ask(server, prompt, skip_reading_prefix_cache=True) == 0
    assert ask(server, prompt, skip_reading_prefix_cache=True) == 0
    # What it has computed is there for others.
    assert ask(server, prompt) == 32


def test_samples_share_though_they_do_not_read(server: Server) -> None:
    scheduler = engine_of(cast(Any, server.engine)).scheduler
    before = scheduler.kv_stats().num_forks
    # All in one step, after which they end.
    assert ask(server, list(range(3, 43)), n=3, skip_reading_prefix_cache=True) == 0
    assert scheduler.kv_stats().num_forks == before + 2


def test_nothing_is_published_past_a_stop_string(server: Server) -> None:
    """Its tokens are computed no further than the last but one of those that are answered."""
    prompt = [(13 * i) % 320 for i in range(20)]
    fields = {"model": "m", "prompt": prompt, "temperature": 0, "return_token_ids": True}
    free = complete(server.url, **fields, max_tokens=60, ignore_eos=True).json["choices"][0]
    stop = free["text"][40:44]
    assert send(server.url, "POST", ROUTE).status == 200
    stopped = complete(server.url, **fields, max_tokens=60, ignore_eos=True, stop=stop)
    (choice,) = stopped.json["choices"]
    assert choice["finish_reason"] == "stop"
    answered = prompt + choice["token_ids"]
    assert len(choice["token_ids"]) < 60
    # A prompt that goes on as the model would have finds what was answered and no more.
    num_cached = ask(server, prompt + free["token_ids"])
    assert num_cached == (len(answered) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_reset(server: Server) -> None:
    prompt = list(range(3, 43))
    ask(server, prompt)
    answer = send(server.url, "POST", ROUTE)
    assert (answer.status, answer.json) == (200, {"num_blocks": 2})
    assert ask(server, prompt) == 0
    assert ask(server, prompt) == 32


def test_reset_is_the_admins() -> None:
    with serve() as server:
        answer = send(server.url, "POST", ROUTE)
        assert answer.status == 404
        assert "--enable-admin-routes" in answer.error["message"]


@pytest.mark.parametrize(("path", "body"), [(f"{ROUTE}?device=gpu", b""), (ROUTE, b"{}")])
def test_reset_takes_nothing(server: Server, path: str, body: bytes) -> None:
    assert send(server.url, "POST", path, body).status == 400


def test_the_tokenizer_is_not_in_the_way(tmp_path: Path) -> None:
    """Token ids alone are cached too, in a model without a tokenizer."""
    for server in server_for(tiny_config()):
        assert [ask(server, list(range(3, 43))) for _ in range(2)] == [0, 32]
