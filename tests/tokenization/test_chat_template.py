from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rawpaged.errors import ConfigError, InvalidRequestError
from rawpaged.tokenization.chat_template import read_chat_template
from rawpaged.tokenization.tokenizer import SpecialTokens, Tokenizer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def chat(byte_level: Tokenizer) -> Tokenizer:
    """The byte-level tokenizer with a ChatML template and BOS and EOS."""
    return Tokenizer(
        byte_level._backend,
        special_tokens=SpecialTokens(bos_token="<|im_start|>", eos_token="<|im_end|>"),
        chat_templates={"default": CHATML},
        affixes=([1], []),
    )


def render(tokenizer: Tokenizer, template: str, *args: Any, **kwargs: Any) -> str:
    return tokenizer.apply_chat_template(*(args or (HI,)), chat_template=template, **kwargs)


def refusal(tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.apply_chat_template(*args, **kwargs)
    return caught.value


def test_chatml(chat: Tokenizer) -> None:
    assert chat.apply_chat_template(HI) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.apply_chat_template(HI, add_generation_prompt=False) == (
        "<|im_start|>user\nHi<|im_end|>\n"
    )


def test_encoded_chat_has_only_the_special_tokens_of_the_template(chat: Tokenizer) -> None:
    ids = chat.encode_chat(HI)
    assert ids == chat.encode(chat.apply_chat_template(HI), add_special_tokens=False)
    assert ids[:2] != [1, 1]


def test_blocks_are_trimmed_and_loops_controlled(chat: Tokenizer) -> None:
    template = (
        "  {% for n in range(9) %}\n    {% if n == 2 %}\n{% break %}\n{% endif %}\n"
        "{{ n }},\n{% endfor %}"
    )
    assert render(chat, template) == "0,\n1,\n"


def test_tojson_is_plain_json(chat: Tokenizer) -> None:
    value = {"b": "<é> & 'x'", "a": [1, None]}
    kwargs = {"chat_template_kwargs": {"v": value}}
    assert render(chat, "{{ v | tojson }}", **kwargs) == '{"b": "<é> & \'x\'", "a": [1, null]}'
    assert render(chat, "{{ v.a | tojson(indent=2) }}", **kwargs) == "[\n  1,\n  null\n]"
    assert render(chat, "{{ v | tojson(sort_keys=true, separators=(',', ':')) }}", **kwargs) == (
        '{"a":[1,null],"b":"<é> & \'x\'"}'
    )
    assert render(chat, "{{ v.b | tojson(ensure_ascii=true) }}", **kwargs) == (
        "\"<\\u00e9> & 'x'\""
    )


def test_variables_that_a_template_sees(chat: Tokenizer) -> None:
    template = (
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ tools }}{{ documents | length }}"
        "{{ enable_thinking }}{{ unk_token is defined }}"
    )
    text = render(
        chat, template, documents=[{"text": "d"}], chat_template_kwargs={"enable_thinking": False}
    )
    assert text == "<|im_start|><|im_end|>None1FalseFalse"


def test_generation_tag_shows_its_body(chat: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% generation %}{% set x = 1 %}[{{ m.content }}]"
        "{% endgeneration %}{% endfor %}"
    )
    assert render(chat, template) == "[Hi]"


def test_strftime_now(chat: Tokenizer) -> None:
    year = render(chat, "{{ strftime_now('%Y') }}")
    assert abs(int(year) - datetime.datetime.now().year) <= 1


def test_named_templates(byte_level: Tokenizer) -> None:
    named = Tokenizer(
        byte_level._backend,
        special_tokens=SpecialTokens(),
        chat_templates={"default": "D", "tool_use": "T", "rag": "R"},
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert named.apply_chat_template(HI) == "D"
    assert named.apply_chat_template(HI, tools=tools) == "T"
    assert named.apply_chat_template(HI, tools=tools, chat_template="rag") == "R"
    assert named.apply_chat_template(HI, tools=[]) == "D"
    assert named.chat_template == "D"
    del named.chat_templates["default"]
    error = refusal(named, HI)
    assert error.param == "chat_template"
    assert "rag, tool_use" in str(error)


def test_without_a_template_the_error_says_what_to_do(byte_level: Tokenizer) -> None:
    error = refusal(byte_level, HI)
    assert error.param == "messages"
    assert "--chat-template" in str(error)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ messages[-1].content }}<end>", " a b ", " a b "),
        ("{{ messages[-1].content | trim }}<end>", " a b ", "a b"),
        ("{{ messages[-1].content }}<end>", "", ""),
        ("<{% for c in messages[-1].content %}{{ c.text }}{% endfor %}>", "abc", None),
        (
            "{% for c in messages[-1].content %}{{ c.text }}{% endfor %}>",
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "ab",
        ),
        ("{{ messages[-1].content }}>", [{"type": "text", "text": "a"}], "a"),
    ],
)
def test_continue_final_message(
    chat: Tokenizer, template: str, content: Any, expected: str | None
) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    kwargs: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    if expected is None:
        assert refusal(chat, messages, chat_template=template, **kwargs).param == "messages"
    else:
        assert render(chat, template, messages, **kwargs) == expected
    assert messages[-1]["content"] == content, "the caller's messages stay as they are"


def test_continue_final_message_cuts_at_the_last_message(chat: Tokenizer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Hi"}]
    text = chat.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi"
    tag = "CONTINUE_FINAL_MESSAGE_TAG "
    messages = [{"role": "user", "content": tag}, {"role": "assistant", "content": "Hi" + tag}]
    text = chat.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("assistant\nHi" + tag), "a message cannot move the cut"
    error = refusal(chat, messages, continue_final_message=True)
    assert error.param == "continue_final_message"
    for last in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        error = refusal(chat, [*HI, last], add_generation_prompt=False, continue_final_message=True)
        assert error.param == "messages"


def test_text_parts_are_joined_by_newlines(chat: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render(chat, "{{ messages[0].content }}", messages) == "a\nb"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for c in m['content'] %}{{ c.text }};{% endfor %}{% endfor %}",
        "{% for c in messages[0].content | list %}{{ c['text'] }};{% endfor %}",
        "{% set body = messages[0].content %}{% for c in body %}{{ c.text }};{% endfor %}",
        "{% macro show(content) %}{% for c in content %}{{ c.text }};{% endfor %}{% endmacro %}"
        "{{ show(messages[0].content) }}",
    ],
)
def test_text_parts_stay_a_list_for_templates_that_loop_over_them(
    chat: Tokenizer, template: str
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(chat, template, [{"role": "user", "content": parts}]) == "a;b;"


def test_missing_content_is_empty_text(chat: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    for message in ({"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": None}):
        assert "assistant\n" in chat.apply_chat_template([message])


def test_tool_call_arguments_become_objects(chat: Tokenizer) -> None:
    template = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    spelled: list[Any] = ['{"x": [1]}', {"y": 2}, "", None]
    calls: list[dict[str, Any]] = [
        {"id": "1", "function": {"name": "f", "arguments": value}} for value in spelled
    ]
    message = {"role": "assistant", "tool_calls": calls}
    assert render(chat, template, [message]) == '{"x": [1]}{"y": 2}{}{}'
    assert calls[0]["function"]["arguments"] == '{"x": [1]}'


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("Hi", "at least one message"),
        (["Hi"], r"messages[0] must be an object"),
        ([{"content": "x"}], "messages[0].role"),
        ([*HI, {"role": 3, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content must be"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "'image_url': only text is supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text must be a string"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "arguments is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}],
            "arguments is not JSON: it is nested too deeply",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}],
            "must spell a JSON object",
        ),
    ],
)
def test_bad_messages_are_named(chat: Tokenizer, messages: Any, words: str) -> None:
    error = refusal(chat, messages)
    assert error.param == "messages"
    assert words in str(error)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ nothing.at_all }}", "undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "str"),
        ("{% for n in range(1000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages | tojson(indent='x' * 2, sort_keys=1) }}{{ raise_exception('') }}", ""),
    ],
)
def test_errors_in_a_template_are_the_request_s(chat: Tokenizer, template: str, words: str) -> None:
    error = refusal(chat, HI, chat_template=template)
    assert error.param == "messages"
    assert words in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ x",
        "{% generation %}",
        "{% zork %}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
    ],
)
def test_a_template_that_does_not_compile_is_named(chat: Tokenizer, template: str) -> None:
    error = refusal(chat, HI, chat_template=template)
    assert error.param == "chat_template"
    assert "cannot be compiled" in str(error)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_user_variables_cannot_hide_the_server_s(chat: Tokenizer, name: str) -> None:
    assert refusal(chat, HI, chat_template_kwargs={name: 1}).param == "chat_template_kwargs"


def test_lone_surrogates_in_messages(chat: Tokenizer) -> None:
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "a\ud800"}]
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as caught:
        chat.encode_chat(messages)
    assert caught.value.param == "messages"


def test_a_template_may_be_given_as_text_or_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_chat_template(str(path)) == "{{ 'é' }}"
    assert read_chat_template("{{ 1 }}") == "{{ 1 }}"
    with pytest.raises(ConfigError, match="neither a template nor a readable file"):
        read_chat_template(str(tmp_path / "missing.jinja"))
    with pytest.raises(ConfigError, match="neither a template nor a readable file"):
        read_chat_template("a\0b")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="neither a template nor a readable file"):
        read_chat_template(str(path))
    with pytest.raises(ConfigError, match="line 2"):
        read_chat_template("\n{% if %}")
