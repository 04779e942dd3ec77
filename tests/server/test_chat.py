from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rawpaged.server.protocol import NEUTRAL_CHAT_VALUES
from tests.server.client import chat
from tests.server.conftest import Server
from tests.server.fake_engine import FakeTokenizer

MESSAGES: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
RENDERED = "system:be\nuser:hi\nassistant:"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def last_prompt(server: Server) -> str:
    return FakeTokenizer().decode(server.engine.calls[-1][0])


def test_plain(client: openai.OpenAI, server: Server) -> None:
    completion = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=7)
    assert completion.object == "chat.completion"
    assert completion.id.startswith("chatcmpl-")
    [choice] = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "system"
    assert choice.finish_reason == "length"
    assert last_prompt(server) == RENDERED
    assert completion.usage is not None
    num_prompt_tokens = len(RENDERED) + 1
    assert completion.usage.prompt_tokens == num_prompt_tokens
    assert completion.usage.total_tokens == num_prompt_tokens + 7


def test_default_is_what_the_model_has_room_for(server: Server) -> None:
    answer = chat(server.url).json
    assert answer["usage"]["total_tokens"] == server.engine.max_model_len


def test_max_completion_tokens(server: Server) -> None:
    assert chat(server.url, max_completion_tokens=3).json["usage"]["completion_tokens"] == 3
    assert chat(server.url, max_completion_tokens=3, max_tokens=3).status == 200
    error = chat(server.url, max_completion_tokens=3, max_tokens=4).error
    assert error["param"] == "max_completion_tokens"


def test_stream(client: openai.OpenAI) -> None:
    contents = ["", ""]
    roles: list[list[Any]] = [[], []]
    reasons: list[Any] = [None, None]
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=4,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.usage is None
        [choice] = chunk.choices
        roles[choice.index].append(choice.delta.role)
        contents[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert contents == ["sys", "syst"]
    assert reasons == ["length", "length"]
    assert roles == [["assistant", *[None] * 4]] * 2


def test_logprobs(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["<s>", "s"]
    assert logprobs.content[1].bytes == [115]
    top = logprobs.content[1].top_logprobs
    assert [(entry.token, entry.logprob) for entry in top] == [("t", -0.5), ("s", -1.0)]


def test_top_logprobs_holds_the_chosen_token_only_if_it_is_among_them(server: Server) -> None:
    for count, expected in ((None, ""), (0, ""), (1, "v"), (2, "vu"), (3, "vuw")):
        answer = chat(server.url, max_tokens=2, logprobs=True, top_logprobs=count).json
        entry = answer["choices"][0]["logprobs"]["content"][1]
        assert entry["token"] == "u"
        assert [top["token"] for top in entry["top_logprobs"]] == list(expected)


def test_streamed_logprobs_join_to_the_plain_ones(server: Server) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    plain = chat(server.url, **options).json["choices"][0]["logprobs"]["content"]
    joined = []
    for event in chat(server.url, **options, stream=True).events[:-1]:
        if event["choices"][0]["logprobs"]:
            joined += event["choices"][0]["logprobs"]["content"]
    assert joined == plain


def test_token_ids_and_prompt_logprobs(server: Server) -> None:
    prompt = FakeTokenizer().encode("user:hi\nassistant:")
    answer = chat(server.url, max_tokens=2, return_token_ids=True, prompt_logprobs=0).json
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == prompt[:2]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(prompt)
    events = chat(server.url, max_tokens=2, return_token_ids=True, stream=True).events
    assert [event.get("prompt_token_ids") for event in events[:-1]] == [prompt, None, None]
    assert [event["choices"][0].get("token_ids") for event in events[1:-1]] == [[256], [117]]


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, "user:hi\nassistant:"),
        ({"add_generation_prompt": False}, "user:hi\n"),
        ({"continue_final_message": True}, "user:hi"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "user:hi"),
        ({"chat_template_kwargs": {"suffix": "!"}}, "user:hi\nassistant:!"),
        (
            {"messages": [{"role": "developer", "content": "be"}]},
            "system:be\nassistant:",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ]
            },
            "user:a\nb\nassistant:",
        ),
    ],
)
def test_rendering(server: Server, fields: dict[str, Any], rendered: str) -> None:
    assert chat(server.url, **fields, max_tokens=1).status == 200
    assert last_prompt(server) == rendered


def test_an_answer_can_be_sent_back(client: openai.OpenAI, server: Server) -> None:
    messages = list(MESSAGES)
    completion = client.chat.completions.create(model="fake", messages=messages, max_tokens=4)
    messages.append(completion.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "go on"})
    client.chat.completions.create(model="fake", messages=messages, max_tokens=4)
    assert last_prompt(server).endswith("assistant:sys\nuser:go on\nassistant:")


def test_neutral_values_of_other_fields_pass(server: Server) -> None:
    for name, values in NEUTRAL_CHAT_VALUES.items():
        for value in values:
            assert chat(server.url, **{name: value}, max_tokens=1).status == 200, name


def test_lengths_in_the_refusal(server: Server) -> None:
    error = chat(server.url, max_completion_tokens=1000).error
    assert error["param"] == "max_completion_tokens"
    assert "1000" in error["message"]
    assert "256" in error["message"]
    error = chat(server.url, messages=[{"role": "user", "content": "a" * 300}]).error
    assert error["param"] == "messages"
