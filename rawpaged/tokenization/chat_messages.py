"""Check chat messages and bring them into the shape that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rawpaged.errors import InvalidRequestError
from rawpaged.models.fields import json_complaint


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], *, keep_parts: bool
) -> list[dict[str, Any]]:
    """Copies of the messages as a template may take them; what is wrong is named by its index.

    * Content that is absent or null (an assistant that only calls tools) becomes "".
    * Content given as a list of text parts becomes one string, the parts joined by newlines as
      in vLLM; with `keep_parts` it stays a list, for templates that loop over the parts.
    * Arguments of tool calls, JSON text in the OpenAI API, become the object they spell.

    Other fields are passed on as they are. Raises InvalidRequestError(param="messages").
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", "messages")
    return [
        _prepare_message(message, f"messages[{index}]", keep_parts)
        for index, message in enumerate(messages)
    ]


def _prepare_message(message: Mapping[str, Any], where: str, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a string that is not empty", "messages")
    prepared = {**message, "content": _prepare_content(message.get("content"), where, keep_parts)}
    if message.get("tool_calls") is not None:
        prepared["tool_calls"] = _prepare_tool_calls(message["tool_calls"], where)
    return prepared


def _prepare_content(content: Any, where: str, keep_parts: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"{where}.content must be a string or a list of parts", "messages"
        )
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequestError(
                f'{place} must be {{"type": "text", "text": ...}}, not {str(kind)[:40]!r}: '
                "only text is supported",
                "messages",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{place}.text must be a string", "messages")
    if keep_parts:
        return [dict(part) for part in content]
    return "\n".join(part["text"] for part in content)


def _prepare_tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(tool_calls, str) or not isinstance(tool_calls, Sequence):
        raise InvalidRequestError(f"{where}.tool_calls must be a list", "messages")
    prepared = []
    for index, call in enumerate(tool_calls):
        place = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequestError(f"{place}.function must be an object", "messages")
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, str):
            arguments = _parse_arguments(arguments, f"{place}.function.arguments")
        prepared.append({**call, "function": {**function, "arguments": arguments}})
    return prepared


def _parse_arguments(text: str | None, where: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        complaint = json_complaint(error)
        raise InvalidRequestError(f"{where} is not JSON: {complaint}", "messages") from error
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where} must spell a JSON object", "messages")
    return arguments
