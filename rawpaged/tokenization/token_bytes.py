"""What each token adds to the decoded text, as bytes, so that decoding can go token by token."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import tokenizers

from rawpaged.errors import CheckpointError

REPLACE_EACH_BYTE = "rawpaged.replace-each-byte"
"""Codec error handler: one U+FFFD for each byte that is part of no character."""

_PIECEWISE_DECODERS = {"Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEFT_NEIGHBOUR = "a"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


class TokenBytes:
    """Bytes of every token of a `tokenizers` tokenizer.

    Joined and decoded as UTF-8 with `errors`, the bytes of a token sequence are its text. What
    the first token of a text gives may differ from what it gives later (SentencePiece drops a
    leading space), hence two methods. Raises CheckpointError for a decoder whose text does not
    grow token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._following: dict[int, bytes] = {}
        state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        kinds = _check_decoder(state)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self.errors = REPLACE_EACH_BYTE if self._has_byte_fallback else "replace"
        """How many U+FFFD stand for invalid bytes differs: `tokenizers` shows one for each byte
        token, but one for each cut-off character of a byte-level vocabulary."""

    def first(self, token_id: int) -> bytes | None:
        """Bytes of a token that nothing precedes; None if the vocabulary has no such id."""
        token = self._token(token_id)
        if token is None or self._is_byte_level:
            return self.following(token_id)
        text = self._decode([token])
        byte = self._byte(token)
        # An empty text for a byte means that it was a space, stripped at the start of a text.
        return text.encode() if byte is None or not text else byte

    def following(self, token_id: int) -> bytes | None:
        """Bytes of a token that others precede; None if the vocabulary has no such id."""
        known = self._following.get(token_id)
        if known is not None:
            return known
        token = self._token(token_id)
        if token is None:
            return None
        self._following[token_id] = data = self._byte(token) or self._text_bytes(token)
        return data

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._vocab_size:
            return None
        return self._backend.id_to_token(token_id)

    def _byte(self, token: str) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_fallback else None
        return None if match is None else bytes.fromhex(match[1])

    def _text_bytes(self, token: str) -> bytes:
        if not self._is_byte_level:
            alone = self._decode([_LEFT_NEIGHBOUR])
            return self._decode([_LEFT_NEIGHBOUR, token])[len(alone) :].encode()
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token, which is spelled as plain text
            return token.encode()

    def _decode(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))


def _check_decoder(state: dict[str, Any] | None) -> set[str]:
    """Kinds of decoder in a chain, known to work token by token but for a strip at the start."""
    if state is None:
        return set()
    chain = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in chain]
    if set(kinds) <= {"ByteLevel", "Fuse"}:
        return set(kinds)
    after_fuse = kinds[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    strips = [part for part in chain if part["type"] == "Strip"]
    if (
        not set(kinds) <= _PIECEWISE_DECODERS
        or after_fuse not in ([], ["Strip"])
        or any(part["stop"] != 0 or part["start"] > 1 for part in strips)
    ):
        raise CheckpointError(
            f"tokenizer: a decoder of {' + '.join(kinds)} cannot be streamed; supported are "
            f"ByteLevel, and chains of {', '.join(sorted(_PIECEWISE_DECODERS))} that strip no "
            "more than one leading character"
        )
    return set(kinds)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 is itself, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_level_alphabet()
