"""Every field refuses what it should, by name; nothing that can be sent is answered with 5xx."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rawpaged.errors import InvalidRequestError
from rawpaged.server.protocol import (
    NEUTRAL_CHAT_VALUES,
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
    renamed_errors,
)
from tests.server.client import chat, complete, send
from tests.server.conftest import Server

BIG = 10**30
SHARED_WRONG_VALUES: dict[str, Sequence[Any]] = {
    "n": ("1", 0, -1, 129, 1.5, True, BIG, [1]),
    "temperature": ("1", -0.1, 101, True, BIG, {}),
    "top_p": ("1", 0, -1, 1.1, True),
    "top_k": ("1", -2, 1.5, BIG, True),
    "min_p": ("1", -0.1, 1.1),
    "presence_penalty": ("1", -2.1, 2.1),
    "frequency_penalty": ("1", -2.1, 2.1),
    "repetition_penalty": ("1", 0, -1),
    "logit_bias": ([], {"a": 1}, {"5": "x"}, {"5": 101}, {"5": None}, {"-1": 1}, {"257": 1}),
    "seed": ("1", 1.5, 2**64, -(2**63) - 1, BIG, True),
    "stop": (1, [1], "", [""], ["a"] * 33, {}),
    "stop_token_ids": (1, "1", ["1"], [-1], [257], [BIG], [None]),
    "include_stop_str_in_output": ("true", 1, []),
    "ignore_eos": ("true", 1),
    "max_tokens": ("1", 0, -1, 1.5, 1000, BIG),
    "min_tokens": ("1", -1, 1.5, 300),
    "prompt_logprobs": ("1", -1, 21, True),
    "skip_special_tokens": ("true", 0),
    "skip_reading_prefix_cache": ("true", 1),
    "cache_salt": (1, "", "a" * 1025, ["a"]),
    "priority": ("1", 1.5, True, BIG),
    "use_beam_search": ("true", 1),
    "length_penalty": ("1", True, 0.5, -11, BIG),
    "early_stopping": (1, "always", True, "never", []),
    "return_token_ids": ("true", 1, None),
    "return_tokens_as_token_ids": ("true", 1, None),
    "stream": ("true", 1),
    "stream_options": (
        True,
        [],
        {"include_usage": True},
        {"include_usage": 1},
        {"foo": True},
        {"include_obfuscation": True},
    ),
    "user": (1, ["a"], "a" * 513),
    "request_id": (1, "", "a b", "a\nb", "a" * 129, "é"),
    "model": (1, ["fake"], "other", ""),
}
COMPLETION_WRONG_VALUES: dict[str, Sequence[Any]] = {
    **SHARED_WRONG_VALUES,
    "prompt": (
        None,
        1,
        {},
        [],
        [[]],
        [1, "a"],
        ["a", [1]],
        [1, [1]],
        [1.5],
        [[1.5]],
        [["a"]],
        [None],
        [True],
        [-1],
        [257],
        [[257]],
        [BIG],
        [[1]] * 2049,
    ),
    "logprobs": ("1", True, -1, 21, 1.5),
    "echo": ("true", 1),
    "best_of": ("2", 0, 129, 1.5, True),
    "add_special_tokens": ("true", 1),
}
CHAT_WRONG_VALUES: dict[str, Sequence[Any]] = {
    **SHARED_WRONG_VALUES,
    "messages": (
        None,
        "hi",
        {},
        [],
        ["hi"],
        [{}],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 1}],
        [{"role": "usr", "content": "hi"}],
        [{"role": "tool", "content": "hi", "tool_call_id": "1"}],
        [{"role": "user", "content": "hi", "foo": 1}],
        [{"role": "user", "content": "hi", "name": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "content": "hi", "reasoning_content": 1}],
    ),
    "max_completion_tokens": ("1", 0, -1, 1000, 1.5),
    "logprobs": (1, "true"),
    "top_logprobs": ("1", 1, 2.5),
    "add_generation_prompt": ("true", 1),
    "continue_final_message": ("true", 1),
    "chat_template_kwargs": ([], "a", {"messages": []}, {"add_generation_prompt": True}),
}
UNSUPPORTED: dict[str, Any] = {
    "suffix": "end",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "logits_processors": ["x"],
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "guided_json": {},
    "structured_outputs": {"regex": "a"},
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "truncate_prompt_tokens": 1,
    "foo": None,
    "": 1,
    "x" * 1000: 1,
    "temprature": 1,
}


def cases(table: dict[str, Sequence[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in table.items()
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value"), cases(COMPLETION_WRONG_VALUES))
def test_wrong_value_in_a_completion(server: Server, name: str, value: Any) -> None:
    answer = complete(server.url, **{name: value})
    assert answer.status == (404 if isinstance(value, str) and name == "model" else 400)
    assert answer.error["param"] == name
    assert name in answer.error["message"]


@pytest.mark.parametrize(("name", "value"), cases(CHAT_WRONG_VALUES))
def test_wrong_value_in_a_chat(server: Server, name: str, value: Any) -> None:
    answer = chat(server.url, **{name: value})
    assert answer.status == (404 if isinstance(value, str) and name == "model" else 400)
    assert answer.error["param"] == name


def test_the_tables_cover_every_field() -> None:
    assert set(COMPLETION_WRONG_VALUES) == set(CompletionRequest.__struct_fields__)
    assert set(CHAT_WRONG_VALUES) == set(ChatRequest.__struct_fields__)


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    fields = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    for name in {*fields, *NEUTRAL_CHAT_VALUES}:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(server: Server, name: str) -> None:
    for answer in (
        complete(server.url, **{name: UNSUPPORTED[name]}),
        chat(server.url, **{name: UNSUPPORTED[name]}),
    ):
        assert answer.status == 400
        assert answer.error["param"] == name[:100] + ("..." if len(name) > 100 else "")


@pytest.mark.parametrize("name", ["documents", "chat_template", "reasoning_effort", "modalities"])
def test_unsupported_chat_fields(server: Server, name: str) -> None:
    answer = chat(server.url, **{name: ["audio"]})
    assert answer.status == 400
    assert answer.error["param"] == name
    assert "not supported" in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_fields_at_odds(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = chat(server.url, **fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(param)


def test_missing_fields(server: Server) -> None:
    for path, param in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        answer = send(server.url, "POST", path, {"model": "fake"})
        assert answer.status == 400
        assert answer.error["param"] == param


def test_too_many_choices(server: Server) -> None:
    answer = complete(server.url, prompt=[[1]] * 1025, n=2)
    assert answer.status == 400
    assert answer.error["param"] == "n"


def test_messages_tell_the_place(server: Server) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": 1}]
    message = chat(server.url, messages=turns).error["message"]
    assert message.startswith("messages[1].content: ")
    message = complete(server.url, prompt=[[1], [1, "a"]]).error["message"]
    assert message.startswith("prompt[1][1]: ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"5",
        b"[]",
        b'"a"',
        b"{",
        b"{}x",
        b'{"prompt": "a"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800x"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"\xff": 1}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"prompt=a",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_bodies_that_are_no_json_object(server: Server, path: str, body: bytes) -> None:
    answer = send(server.url, "POST", path, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt", "`prompt` is given twice"),
        (b'{"n": 1, "prompt": "\\":", "n" : 2}', "n", "`n` is given twice"),
        (b'{"n": 1, "prompt": "a", "\\u006e": 2}', "n", "`n` is given twice"),
        (b'{"logit_bias": {"1": 1, "1": 2}}', "logit_bias", "`logit_bias` holds the name `1` tw"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature", "`temperature` holds NaN"),
        (b'{"top_p": -Infinity, "n": 1}', "top_p", "`top_p` holds -Infinity, which is no number"),
        (b'{"logit_bias": {"1": [Infinity]}}', "logit_bias", "`logit_bias` holds Infinity"),
        (b'{"a": 1, "b": [}', None, "the body is not valid JSON here"),
        (b'{"a": NaN, "b": [}', None, "the body is not valid JSON here"),
    ],
)
def test_json_that_readers_differ_in(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(body, CompletionRequest)
    assert str(caught.value).startswith(words)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"n": "x", "prompt": ""}', "n: Expected `integer | null`, got `string`"),
        (b'{"prompt": [[true]]}', "prompt[0][0]: Expected `integer`, got `boolean`"),
        (b'{"prompt": "", "top_p": {}}', "top_p: Expected `number | null`, got `object`"),
        (b"5", "the body must be a JSON object, not `integer`"),
        (
            b'{"prompt": "", "logit_bias": {"01": 1}}',
            'logit_bias: keys must be integers in quotes, such as "42"',
        ),
    ],
)
def test_types_are_named_as_json_has_them(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(body, CompletionRequest)
    assert str(caught.value) == message


def test_strings_that_look_like_names() -> None:
    body = b'{"prompt": "\\"n\\": 1, \\"n\\": 2", "logit_bias": {"1": 1, "2": 1}, "n": 3}'
    parsed = parse_body(body, CompletionRequest)
    assert (parsed.prompt, parsed.n) == ('"n": 1, "n": 2', 3)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("1e999", "temperature"),
        ("-1e999", "temperature"),
        ("1" + "0" * 400, "temperature"),
        ("1" + "0" * 5000, "n"),
        ('{"5": 1' + "0" * 400 + "}", "logit_bias"),
    ],
)
def test_monstrous_values_are_refused_by_name(server: Server, value: str, name: str) -> None:
    body = f'{{"model": "fake", "prompt": "a", "{name}": {value}}}'.encode()
    answer = send(server.url, "POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == name
    assert len(answer.error["message"]) < 1000


def test_renamed_errors() -> None:
    names = {"logprobs": "top_logprobs"}
    with pytest.raises(InvalidRequestError) as caught, renamed_errors(names):
        raise InvalidRequestError("logprobs must be at least 0", "logprobs")
    assert str(caught.value) == "top_logprobs must be at least 0"
    assert caught.value.param == "top_logprobs"
    with pytest.raises(InvalidRequestError) as caught, renamed_errors(names):
        raise InvalidRequestError("no field's fault")
    assert caught.value.param is None


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=5)
    | st.sampled_from(["user", "fake", "text", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["role", "content"]), inner)
    ),
    max_leaves=5,
)
VALID_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=3) | st.lists(st.integers(0, 300), max_size=3),
    "messages": st.just([{"role": "user", "content": "a"}]),
    "model": st.just("fake"),
    "max_tokens": st.integers(-1, 4),
    "n": st.integers(0, 3),
    "logprobs": st.booleans() | st.integers(-1, 3),
    "top_logprobs": st.integers(-1, 3),
    "stream": st.booleans(),
    "echo": st.booleans(),
}


@st.composite
def bodies(draw: st.DrawFn, request_type: Any) -> bytes:
    """A body that is nearly right: known fields, some of them with any JSON value."""
    names = [*request_type.__struct_fields__, *NEUTRAL_VALUES, *NEUTRAL_CHAT_VALUES]
    body: dict[str, Any] = {}
    for name in ("prompt", "messages", "tokens"):
        if name in request_type.__struct_fields__:
            body[name] = draw(VALID_VALUES.get(name, JSON_VALUES))
    for name in draw(st.lists(st.sampled_from(names) | st.text(max_size=3), max_size=3)):
        body[name] = draw(VALID_VALUES.get(name, JSON_VALUES))
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(names))] = draw(JSON_VALUES)
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("path", "request_type"),
    [
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ],
)
def test_no_body_is_answered_with_5xx(server: Server, path: str, request_type: Any) -> None:
    @settings(
        max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(body=bodies(request_type) | st.binary(max_size=30))
    def check(body: bytes) -> None:
        answer = send(server.url, "POST", path, body)
        if answer.status == 200:
            assert b'"error"' not in answer.body
        else:
            assert 400 <= answer.status < 500
            assert answer.error

    check()


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=60) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_parsing_raises_nothing_else(body: bytes) -> None:
    for request_type in (CompletionRequest, ChatRequest):
        with contextlib.suppress(InvalidRequestError):
            parse_body(body, request_type, NEUTRAL_CHAT_VALUES)


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"[]", "`array`"), (b"1", "`integer`"), (b'"a"', "`string`"), (b"null", "`null`")],
)
def test_body_of_another_kind(body: bytes, kind: str) -> None:
    with pytest.raises(InvalidRequestError) as info:
        parse_body(body, CompletionRequest)
    assert str(info.value) == f"the body must be a JSON object, not {kind}"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            {"role": "to'ol", "content": "a"},
            'role: "to\'ol" is not supported, only system, developer, user, assistant',
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "content[0].type: 'image_url' is not supported, only text",
        ),
    ],
)
def test_what_a_message_may_say(message: dict[str, Any], complaint: str) -> None:
    body = json.dumps({"messages": [message]}).encode()
    with pytest.raises(InvalidRequestError) as info:
        parse_body(body, ChatRequest)
    assert info.value.param == "messages"
    assert str(info.value) == f"messages[0].{complaint}"
