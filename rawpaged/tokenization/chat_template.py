"""Render chat messages through a model's Jinja template, as transformers does.

Templates run in jinja2's immutable sandbox: no access to Python internals, no changes to what is
passed in, `range` limited to 100,000. The time and the memory of a template are not bounded
(nested loops, repeated strings), so a template is to be trusted like the weights it comes with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rawpaged.errors import ConfigError, InvalidRequestError
from rawpaged.tokenization.chat_messages import prepare_messages

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark at the end of the message to continue; some templates know it by name."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is all."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template; the constructor raises what jinja2 does for a source that is none."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._keeps_parts = _loops_over_content(environment.parse(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text; `variables` are tools, documents, special tokens and the user's own.

        With `continue_final_message` the text ends with the last message's content, trimmed only
        where the template trims it. Raises InvalidRequestError(param="messages") for whatever
        goes wrong in the template, its own `raise_exception` included.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        prepared = prepare_messages(messages, keep_parts=self._keeps_parts)
        if continue_final_message:
            if messages[-1].get("content") is None:
                raise InvalidRequestError(
                    "continue_final_message is set but the last message has no content", "messages"
                )
            _tag_final_message(prepared[-1])
        try:
            text = self._template.render(
                {
                    **variables,
                    "messages": prepared,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:
            # A template is a program: besides TemplateError it raises what Python expressions do.
            raise InvalidRequestError(
                f"the chat template refused the messages: {error or type(error).__name__}",
                "messages",
            ) from error
        return _cut_at_tag(text) if continue_final_message else text


@functools.lru_cache(maxsize=16)
def compile_chat_template(source: str) -> ChatTemplate:
    """The template of this source, compiled once. Raises InvalidRequestError if it is not one."""
    try:
        return ChatTemplate(source)
    except Exception as error:  # SyntaxError, RecursionError and others for unusual nesting
        raise InvalidRequestError(
            f"the chat template cannot be compiled: {_describe(error)}", "chat_template"
        ) from error


def read_chat_template(argument: str) -> str:
    """Jinja text given as such, or as the name of a file that holds it.

    Text with a brace or a newline is a template, anything else a file name. Raises ConfigError
    if the file cannot be read or the text is no template.
    """
    text = argument
    if not any(char in argument for char in "{}\n"):
        try:
            text = Path(argument).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"chat_template={argument!r} is neither a template nor a readable file: {error}"
            ) from error
    try:
        ChatTemplate(text)
    except Exception as error:  # as above
        raise ConfigError(f"chat_template cannot be compiled: {_describe(error)}") from error
    return text


def choose_chat_template(
    templates: Mapping[str, str], requested: str | None, *, has_tools: bool
) -> str:
    """Source of the template to use: the one requested, by text or name, or the model's own.

    Of several, "tool_use" serves requests with tools and "default" the others, as in transformers.
    """
    if requested is not None:
        return templates.get(requested, requested)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise InvalidRequestError(
            "the model has several chat templates and none is the default; choose one of "
            f"{', '.join(sorted(templates))} as chat_template",
            "chat_template",
        )
    raise InvalidRequestError(
        "the model has no chat template: start the server with --chat-template (LLM(..., "
        "chat_template=...)), or send a plain prompt instead of messages",
        "messages",
    )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError if a user's template variables hide what the server passes."""
    for name in variables:
        if name in _RESERVED or not isinstance(name, str):
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {name!r}", "chat_template_kwargs"
            )


def _describe(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return str(error) if line is None else f"line {line}: {error}"


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a template has a `for` over a message's content, or over a variable holding it."""
    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _tag_final_message(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_TAG
    elif content:
        content[-1]["text"] += _CONTINUE_TAG


def _cut_at_tag(text: str) -> str:
    start = text.rfind(_CONTINUE_TAG.strip())
    if start < 0:
        raise InvalidRequestError(
            "continue_final_message is set but the chat template leaves out the end of the last "
            "message",
            "messages",
        )
    # A template that trims the tag's space would have trimmed the message's own as well.
    kept = text[:start]
    return kept if text.startswith(_CONTINUE_TAG, start) else kept.rstrip()
