"""The fields of a request's body: JSON as RFC 8259 has it, and none of what readers differ in.

msgspec reads fast, but keeps the last of two fields of one name, and cannot tell which field it
stumbles over. The standard library can, and is asked only where there is something to find.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rawpaged.errors import InvalidRequestError

MAX_SHOWN_NAME = 100

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEY_END = re.compile(rb'"[ \t\r\n]*:')
_NO_OBJECT = re.compile(r"Expected `object`, got (?P<kind>`\w+`)")


_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPE = re.compile(r"\b(?:str|int|float|bool)\b")


def in_json_words(text: str) -> str:
    """msgspec's complaint about a type, with types named as JSON has them."""
    if not text.startswith("Expected `"):
        return text
    return _TYPE.sub(lambda match: _TYPES[match[0]], text)


def decode_fields(body: bytes) -> dict[str, Any]:
    """The JSON object's fields.

    Raises InvalidRequestError, whose `param` is the top-level field at fault where one is: for what
    is no JSON object, NaN and Infinity included, and for a name given twice in any object.
    """
    name = None
    fields: dict[str, Any] = {}
    try:
        raw = _fields_decoder.decode(body)
        for name, value in raw.items():
            # Each by itself, so that an error can name its field.
            fields[name] = msgspec.json.decode(value)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", name) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain(body, error, name) from None
    _check_names(body, fields, raw)
    return fields


def shown_name(name: str) -> str:
    """A field's name as far as it fits in a message."""
    return name if len(name) <= MAX_SHOWN_NAME else name[:MAX_SHOWN_NAME] + "..."


def _explain(body: bytes, error: Exception, name: str | None) -> InvalidRequestError:
    if match := _NO_OBJECT.fullmatch(in_json_words(str(error))):
        return InvalidRequestError(f"the body must be a JSON object, not {match['kind']}")
    if found := _find_no_number(body):
        name, word = found
        return InvalidRequestError(f"`{name}` holds {word}, which is no number in JSON", name)
    where = "the body" if name is None else f"`{shown_name(name)}`"
    return InvalidRequestError(f"{where} is not valid JSON here: {error}", name)


class _NoNumber(str):
    """NaN, Infinity or -Infinity, which the standard library would read as a number."""

    __slots__ = ()


def _find_no_number(body: bytes) -> tuple[str, str] | None:
    """The field that holds NaN or an infinity, and which."""
    try:
        fields = json.loads(body.decode(), parse_constant=_NoNumber, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        values = [value]
        while values:
            each = values.pop()
            if isinstance(each, _NoNumber):
                return shown_name(name), str(each)
            values += each.values() if isinstance(each, dict) else ()
            values += each if isinstance(each, list) else ()
    return None


class _NameTwiceError(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = shown_name(name)


def _check_names(body: bytes, fields: Mapping[str, Any], raw: Mapping[str, msgspec.Raw]) -> None:
    """Raises InvalidRequestError if an object in the body, which is valid JSON, repeats a name."""
    # Every name ends so, and only strings can hold more of it: with that many there is no other.
    if len(_KEY_END.findall(body)) == len(fields):
        return
    try:
        _read_unique(body)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except _NameTwiceError as error:
        twice = error.name
    else:
        return
    for name, value in raw.items():
        try:
            _read_unique(bytes(value))
        except _NameTwiceError as error:
            field = shown_name(name)
            message = f"`{field}` holds the name `{error.name}` twice in one object; send it once"
            raise InvalidRequestError(message, field) from None
    raise InvalidRequestError(f"`{twice}` is given twice; send it once", twice)


def _read_unique(text: bytes) -> None:
    """Raises _NameTwiceError."""
    json.loads(text.decode(), object_pairs_hook=_unique_names, parse_int=str, parse_float=str)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _NameTwiceError(name)
            seen.add(name)
    return values
