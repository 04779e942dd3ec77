"""Turn the tokens of a running request into text, as each character becomes complete."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

from rawpaged.tokenization.token_bytes import TokenBytes

PROMPT_TAIL_TOKENS = 8
"""Prompt tokens that are decoded as context: more than the bytes of an unfinished character."""


class IncrementalDetokenizer:
    """Text of an output, token by token, with no half characters.

    All that `append` and `finish` return, joined, is decode(output ids) where there is no prompt.
    With a prompt it is decode(tail + output) without its prefix decode(tail), tail being the last
    PROMPT_TAIL_TOKENS prompt ids: an output that continues a prompt keeps its leading space, and
    a character that the prompt began and the output completes belongs to the output.

    Bytes that can no longer become a character come out as U+FFFD at once; at most three bytes
    wait for their continuation, until `finish`.
    """

    __slots__ = ("_errors", "_pending", "_prompt_rest", "_skipped_ids", "_started", "_token_bytes")

    def __init__(
        self,
        token_bytes: TokenBytes,
        skipped_ids: Set[int],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        """Ids that give no text and that the others are decoded without."""
        self._errors = token_bytes.errors
        self._pending = b""
        """Start of a character, at most three bytes."""
        self._started = False
        self._prompt_rest = ""
        for token_id in prompt_token_ids[-PROMPT_TAIL_TOKENS:]:
            self.append(token_id)
        # What decode(tail) shows for the prompt's unfinished character, if it has one.
        self._prompt_rest = self._pending.decode(errors=self._errors)

    def append(self, token_id: int) -> str:
        """Text that this token completes; "" for an id that the vocabulary does not have."""
        if token_id in self._skipped_ids:
            return ""
        if self._started:
            data = self._token_bytes.following(token_id)
        else:
            data = self._token_bytes.first(token_id)
            self._started = data is not None
        return self._decode(data, final=False) if data else ""

    def finish(self) -> str:
        """U+FFFD for what never became a character, or ""."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, self._errors, final)
        self._pending = data[used:]
        if self._prompt_rest and (text or final):
            text = text.removeprefix(self._prompt_rest)
            self._prompt_rest = ""
        return text
