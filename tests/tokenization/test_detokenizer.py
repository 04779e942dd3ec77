from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rawpaged.tokenization.detokenizer import PROMPT_TAIL_TOKENS
from rawpaged.tokenization.tokenizer import Tokenizer

CHARACTERS = st.sampled_from(
    [*"ab .,'\n\0", "é", "ß", "日", "本", "😀", "👨‍👩‍👧", "👍🏽", "\ufffd", "\u2581", "🇩🇪"]
)
TEXTS = st.lists(CHARACTERS, max_size=20).map("".join)


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.incremental(skip_special_tokens=skip, prompt_token_ids=prompt)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The bytes one by one, each as the token that stands for it."""
    by_byte = {}
    for token_id in reversed(range(tokenizer.vocab_size)):
        piece = tokenizer._token_bytes.following(token_id)
        if piece is not None and len(piece) == 1:
            by_byte[piece] = token_id
    return [by_byte[bytes([byte])] for byte in data]


@given(data=st.data(), skip=st.booleans())
def test_byte_level_stream_equals_the_library(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=30))
    expected = byte_level._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(byte_level, ids, [], skip)) == expected
    assert byte_level.decode(ids, skip_special_tokens=skip) == expected


@given(raw=st.binary(max_size=24))
def test_byte_level_stream_of_any_bytes_equals_a_lossy_decode(
    byte_level: Tokenizer, raw: bytes
) -> None:
    ids = byte_ids(byte_level, raw)
    assert "".join(stream(byte_level, ids, [], True)) == raw.decode(errors="replace")
    assert byte_level._backend.decode(ids) == raw.decode(errors="replace")


@given(text=TEXTS)
def test_no_half_character_is_shown(byte_level: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, spm):
        ids = byte_ids(tokenizer, text.encode())
        chunks = stream(tokenizer, ids, ids[:1], True)
        shown = ""
        for number, chunk in enumerate(chunks[:-1], start=1):
            shown += chunk
            assert text.startswith(shown)
            complete = text.encode()[:number].decode(errors="ignore")
            assert shown == complete, "a complete character must not wait"
        assert chunks[-1] == ""


@given(data=st.data())
def test_spm_stream_equals_the_library_on_texts(spm: Tokenizer, data: st.DataObject) -> None:
    letters = st.integers(259, spm.vocab_size + 3)
    characters = CHARACTERS.map(lambda text: byte_ids(spm, text.encode()))
    pieces = data.draw(st.lists(letters.map(lambda token_id: [token_id]) | characters))
    ids = [token_id for piece in pieces for token_id in piece]
    assert "".join(stream(spm, ids, [], True)) == spm._backend.decode(ids)


@given(ids=st.lists(st.integers(0, 265), max_size=12))
def test_spm_keeps_valid_characters_beside_invalid_bytes(spm: Tokenizer, ids: list[int]) -> None:
    text = spm.decode(ids)
    raw = b"".join(spm._token_bytes.following(i) or b"" for i in ids if i > 2)
    kept = raw.decode(errors="ignore").replace("\ufffd", "")
    assert text.replace("\ufffd", "").strip() == kept.strip()
    assert "".join(stream(spm, ids, [], True)) == text


def test_spm_shows_one_mark_for_each_invalid_byte_as_the_library_does(spm: Tokenizer) -> None:
    ids = [*byte_ids(spm, "😀".encode()[:3]), *spm.encode("a", add_special_tokens=False)]
    assert spm.decode(ids) == spm._backend.decode(ids) == "\ufffd" * 3 + " a"
    assert stream(spm, ids[:3], [], True) == ["", "", "", "\ufffd" * 3]


@given(
    prompt=st.lists(st.integers(0, 430), max_size=12),
    output=st.lists(st.integers(0, 430), max_size=12),
    skip=st.booleans(),
)
def test_after_a_prompt_the_text_is_what_the_output_adds(
    byte_level: Tokenizer, spm: Tokenizer, prompt: list[int], output: list[int], skip: bool
) -> None:
    for tokenizer in (byte_level, spm):
        tail = prompt[-PROMPT_TAIL_TOKENS:]
        before = tokenizer.decode(tail, skip_special_tokens=skip)
        whole = tokenizer.decode(tail + output, skip_special_tokens=skip)
        text = "".join(stream(tokenizer, output, prompt, skip))
        # Usually all of `before`, but not the mark of a character that the output completes.
        kept = before
        while not whole.startswith(kept):
            assert kept.endswith("\ufffd")
            kept = kept[:-1]
        assert text == whole.removeprefix(kept)


def test_a_character_begun_by_the_prompt_belongs_to_the_output(byte_level: Tokenizer) -> None:
    emoji = byte_ids(byte_level, "x😀".encode())
    assert stream(byte_level, emoji[3:], emoji[:3], True) == ["", "😀", ""]
    broken = byte_ids(byte_level, b"a")
    assert stream(byte_level, broken, emoji[:3], True) == ["a", ""]
    assert stream(byte_level, [], emoji[:3], True) == [""]


def test_spm_leading_space(spm: Tokenizer) -> None:
    ids = spm.encode("the dog", add_special_tokens=False)
    prompt = spm.encode("a block")
    assert "".join(stream(spm, ids, [], True)) == "the dog"
    assert "".join(stream(spm, ids, prompt, True)) == " the dog"
    assert "".join(stream(spm, ids, [1], True)) == "the dog", "a skipped BOS is no text"
    assert "".join(stream(spm, ids, [1], False)) == " the dog"
    assert "".join(stream(spm, [100_000, *ids], [], True)) == "the dog"


def test_invalid_bytes_come_out_at_once_and_cost_no_memory(byte_level: Tokenizer) -> None:
    (token_id,) = byte_ids(byte_level, b"\xff")
    detokenizer = byte_level.incremental(skip_special_tokens=True)
    for _ in range(1000):
        assert detokenizer.append(token_id) == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_are_shown_or_skipped(byte_level: Tokenizer) -> None:
    end = byte_level.encode("<|im_end|>", add_special_tokens=False)
    assert stream(byte_level, end, [], True) == ["", ""]
    assert stream(byte_level, end, [], False) == ["<|im_end|>", ""]


def test_ids_beyond_the_vocabulary_give_nothing(byte_level: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (byte_level, spm):
        for token_id in (-1, tokenizer.vocab_size, 2**31, 2**70):
            assert stream(tokenizer, [token_id], [token_id], True) == ["", ""]
            assert tokenizer.token_text(token_id) == ""
