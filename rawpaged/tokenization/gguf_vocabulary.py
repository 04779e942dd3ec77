"""Read and check the tokenizer that a GGUF file describes in its metadata."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rawpaged.errors import CheckpointError

_PREFIX = "tokenizer.ggml."


class TokenType(enum.IntEnum):
    """llama.cpp's kinds of token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Special: matched as a whole in text, left out when decoding without specials."""
    USER_DEFINED = 4
    """Matched as a whole in text, but ordinary text when decoded."""
    UNUSED = 5
    BYTE = 6
    """`<0xNN>`, a byte of a character that the vocabulary lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Checked content of `tokenizer.ggml.*`: lists of equal length, ids in range."""

    tokens: list[str]
    types: list[TokenType]
    scores: list[float] | None
    """SentencePiece scores; None for other kinds."""
    merges: list[tuple[str, str]] | None
    """Byte-pair merges in order of rank; None for SentencePiece."""
    model: str
    """"gpt2" (byte-level BPE) or "llama" (SentencePiece BPE)."""
    pre: str
    """Name of the splitting rules of a byte-level BPE; "default" if the file gives none."""
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    add_bos_token: bool | None
    """None where the file does not say, as in the two below."""
    add_eos_token: bool | None
    add_space_prefix: bool | None

    def has_text(self, token_id: int) -> bool:
        """False for padding of the vocabulary, which neither encodes nor decodes."""
        return bool(self.tokens[token_id]) and self.types[token_id] is not TokenType.UNUSED


def read_gguf_vocabulary(metadata: Mapping[str, object]) -> GgufVocabulary:
    """Raises CheckpointError, naming the key, for metadata that describes no tokenizer."""
    model = _string(metadata, "model")
    if model not in ("gpt2", "llama"):
        raise _error(
            "model",
            f"{model!r} is not supported; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)",
        )
    tokens = _strings(metadata, "tokens")
    _check_unique("tokens", [token for token in tokens if token])
    is_gpt2 = model == "gpt2"
    ids = {
        name: _token_id(metadata, key, len(tokens), None if is_gpt2 else default)
        for name, key, default in (
            ("bos_token_id", "bos_token_id", 1),
            ("eos_token_id", "eos_token_id", 2),
            ("pad_token_id", "padding_token_id", None),
            ("unk_token_id", "unknown_token_id", 0),
        )
    }
    return GgufVocabulary(
        tokens=tokens,
        types=_types(metadata, len(tokens), ids),
        scores=None if is_gpt2 else _scores(metadata, len(tokens)),
        merges=_merges(metadata) if is_gpt2 else None,
        model=model,
        pre=_string(metadata, "pre") if _PREFIX + "pre" in metadata else "default",
        add_bos_token=_flag(metadata, "add_bos_token"),
        add_eos_token=_flag(metadata, "add_eos_token"),
        add_space_prefix=_flag(metadata, "add_space_prefix"),
        **ids,
    )


def _error(key: str, problem: str) -> CheckpointError:
    return CheckpointError(f"GGUF metadata {_PREFIX}{key}: {problem}")


def _string(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, str):
        raise _error(key, "missing" if value is None else "must be a string")
    return value


def _flag(metadata: Mapping[str, object], key: str) -> bool | None:
    value = metadata.get(_PREFIX + key)
    if value is not None and not isinstance(value, bool):
        raise _error(key, f"must be a bool, not {value!r:.40}")
    return value


def _list(metadata: Mapping[str, object], key: str) -> list[object]:
    value = metadata.get(_PREFIX + key)
    value = getattr(value, "tolist", lambda: value)()  # an array becomes plain numbers
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _error(key, "missing" if value is None else "must be an array")
    return list(value)


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _list(metadata, key)
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) < len(values):
        index, value = next((i, v) for i, v in enumerate(values) if not isinstance(v, str))
        raise _error(f"{key}[{index}]", f"must be a string, not {value!r:.40}")
    return strings


def _check_unique(key: str, values: Sequence[object]) -> None:
    if len(set(values)) == len(values):
        return
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise _error(key, f"{value!r:.80} occurs twice")
        seen.add(value)


def _token_id(
    metadata: Mapping[str, object], key: str, num_tokens: int, default: int | None
) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return default if default is not None and default < num_tokens else None
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise _error(key, f"must be an integer, not {value!r:.40}")
    token_id = int(value)
    if not 0 <= token_id < num_tokens:
        raise _error(key, f"{token_id} is not among the {num_tokens} tokens")
    return token_id


def _types(
    metadata: Mapping[str, object], num_tokens: int, ids: Mapping[str, int | None]
) -> list[TokenType]:
    if _PREFIX + "token_type" not in metadata:
        control = {ids["bos_token_id"], ids["eos_token_id"], ids["unk_token_id"]}
        return [
            TokenType.CONTROL if token_id in control else TokenType.NORMAL
            for token_id in range(num_tokens)
        ]
    known = {int(kind): kind for kind in TokenType}
    values = _list(metadata, "token_type")
    _check_length("token_type", len(values), num_tokens)
    types = [known[value] for value in values if isinstance(value, int) and value in known]
    if len(types) < len(values):
        for index, value in enumerate(values):
            if not isinstance(value, int) or value not in known:
                raise _error(f"token_type[{index}]", f"{value!r:.40} is none of {sorted(known)}")
    return types


def _scores(metadata: Mapping[str, object], num_tokens: int) -> list[float]:
    values = _list(metadata, "scores")
    _check_length("scores", len(values), num_tokens)
    scores = []
    for index, value in enumerate(values):
        if not isinstance(value, numbers.Real) or math.isnan(value):
            raise _error(f"scores[{index}]", f"must be a number, not {value!r:.40}")
        scores.append(float(value))
    return scores


def _merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    lines = _strings(metadata, "merges")
    splits = [merge.split(" ") for merge in lines]
    merges = [(parts[0], parts[1]) for parts in splits if len(parts) == 2 and all(parts)]
    if len(merges) < len(lines):
        for index, parts in enumerate(splits):
            if len(parts) != 2 or not all(parts):
                complaint = f"{lines[index]!r:.80} is not two tokens and a space"
                raise _error(f"merges[{index}]", complaint)
    _check_unique("merges", merges)
    return merges


def _check_length(key: str, length: int, num_tokens: int) -> None:
    if length != num_tokens:
        raise _error(key, f"holds {length} values for {num_tokens} tokens")
