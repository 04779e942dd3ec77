"""Read the tokenizer files of a Hugging Face checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from rawpaged.errors import CheckpointError
from rawpaged.models.fields import json_complaint

MAX_FILE_BYTES = 512 << 20
"""Larger files are refused; the largest vocabularies known take a tenth of that."""

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tokenizer.json. Raises CheckpointError naming the file."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; a SentencePiece tokenizer.model alone is not supported, save "
            "the tokenizer with transformers to get a tokenizer.json"
        )
    _check_size(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no file. Raises CheckpointError naming the file."""
    if not path.is_file():
        return {}
    _check_size(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {json_complaint(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def read_token_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, where older checkpoints name tokens."""
    config = read_json_object(directory / "tokenizer_config.json")
    named = read_json_object(directory / "special_tokens_map.json")
    return {**named, **{key: value for key, value in config.items() if value is not None}}


def special_token_text(settings: Mapping[str, Any], name: str) -> str | None:
    """Text of a named special token, which is written as a string or as an object."""
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"tokenizer_config.json: {name} must be a string, not {value!r:.40}")
    return value


def add_configured_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json lists beyond tokenizer.json, as transformers does.

    Tokens that it merely names as special become special if the vocabulary has them; a name that
    the vocabulary lacks is left out, since the model could not embed its new id.
    """
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder must be an object")
    for key, entry in sorted(listed.items(), key=lambda item: item[0].zfill(12)):
        _add_listed_token(backend, key, entry)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in _special_texts(settings):
        is_special = text in known and known[text].special
        if not is_special and backend.token_to_id(text) is not None:
            backend.add_special_tokens(
                [tokenizers.AddedToken(text, special=True, normalized=False)]
            )


def read_chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, the one without a name as "default".

    chat_template.jinja and additional_chat_templates/ go before chat_template.json, and that
    before tokenizer_config.json, as in transformers.
    """
    templates = _templates_of(settings.get("chat_template"), "tokenizer_config.json")
    name = "chat_template.json"
    templates |= _templates_of(read_json_object(directory / name).get("chat_template"), name)
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    for name, path in files.items():
        if path.is_file():
            _check_size(path)
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: {error}") from error
    return templates


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise CheckpointError(f"{path}: {size} bytes are more than the {MAX_FILE_BYTES} allowed")


def _add_listed_token(backend: tokenizers.Tokenizer, key: str, entry: Any) -> None:
    where = f"tokenizer_config.json: added_tokens_decoder[{key!r:.40}]"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise CheckpointError(f"{where} must be an object with the token's content")
    content = entry["content"]
    flags = {
        flag: bool(entry.get(flag, False))
        for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    known = backend.get_added_tokens_decoder().get(int(key) if key.isdecimal() else -1)
    if known is not None and (known.content, known.special) == (content, flags["special"]):
        return
    backend.add_tokens([tokenizers.AddedToken(content, **flags)])
    token_id = backend.token_to_id(content)
    if str(token_id) != key:
        raise CheckpointError(f"{where}: {content!r:.40} has id {token_id} in tokenizer.json")


def _special_texts(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in _NAMED_TOKENS:
        text = special_token_text(settings, name)
        if text:
            yield text
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = settings.get(name) or []
        if isinstance(extra, Mapping):  # newer files name them: {"image_token": "<image>"}
            extra = list(extra.values())
        if not isinstance(extra, list):
            raise CheckpointError(f"tokenizer_config.json: {name} must be a list")
        for token in extra:
            text = special_token_text({name: token}, name)
            if text:
                yield text


def _templates_of(value: Any, file_name: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(entry, Mapping)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    ):
        return {entry["name"]: entry["template"] for entry in value}
    raise CheckpointError(
        f"{file_name}: chat_template must be a string or a list of {{name, template}}"
    )
