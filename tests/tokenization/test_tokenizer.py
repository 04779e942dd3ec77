from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rawpaged.errors import CheckpointError, InvalidRequestError
from rawpaged.tokenization import tokenizer_files
from rawpaged.tokenization.tokenizer import Tokenizer, load_tokenizer_from_directory


@pytest.fixture
def directory(byte_level_directory: Path, tmp_path: Path) -> Path:
    """A copy of the byte-level tokenizer's directory, to be added to."""
    (tmp_path / "tokenizer.json").write_bytes(
        (byte_level_directory / "tokenizer.json").read_bytes()
    )
    return tmp_path


def write(directory: Path, name: str, content: Any) -> None:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def edit_tokenizer(directory: Path, **fields: Any) -> None:
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    write(directory, "tokenizer.json", content | fields)


@pytest.mark.parametrize(
    "text", ["", "the dog", "a\0b", "日本語 😀\r\n", " ", "\ufffd", "<|im_end|>"]
)
def test_decode_gives_back_what_was_encoded(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_spelled_in_a_text_are_parsed(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>") == [1]
    assert byte_level.decode([1]) == ""


@pytest.mark.parametrize("text", ["\ud800", "abc\udfffdef"])
def test_lone_surrogates_are_refused(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as caught:
        byte_level.encode(text)
    assert caught.value.param is None


def test_a_megabyte_takes_seconds_at_most(byte_level: Tokenizer, spm: Tokenizer) -> None:
    start = time.monotonic()
    for tokenizer in (byte_level, spm):
        for text in ("the quick brown fox " * 50_000, "a" * 1_000_000, "é😀" * 200_000):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.monotonic() - start < 60


def test_token_text_is_the_token_within_a_text(byte_level: Tokenizer, spm: Tokenizer) -> None:
    the = spm.encode("the")[-1]
    assert spm.token_text(the) == " the"
    assert spm.token_text(1) == "<s>"
    assert byte_level.token_text(2) == "<|im_end|>"
    assert byte_level.token_text(byte_level.encode("\x80")[0]) == "\ufffd"


def test_from_a_directory_or_its_tokenizer_json(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"bos_token": "<|im_start|>", "chat_template": "C"})
    for path in (directory, directory / "tokenizer.json"):
        tokenizer = load_tokenizer_from_directory(path)
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_id is None
        assert tokenizer.chat_template == "C"
        assert tokenizer.vocab_size == len(tokenizer._backend.get_vocab())


def test_special_tokens_come_from_config_then_from_the_map(directory: Path) -> None:
    write(
        directory,
        "tokenizer_config.json",
        {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "bos_token": None},
    )
    write(
        directory,
        "special_tokens_map.json",
        {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"},
    )
    tokenizer = load_tokenizer_from_directory(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [2, 64]),
        ({"add_bos_token": True}, [1, 64]),
        ({"add_bos_token": False}, [64]),
        ({"add_eos_token": True}, [64, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 64, 2]),
    ],
)
def test_add_bos_and_eos_replace_the_post_processor(
    directory: Path, flags: dict[str, bool], expected: list[int]
) -> None:
    edit_tokenizer(
        directory,
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}
            },
        },
    )
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write(directory, "tokenizer_config.json", {**named, **flags})
    tokenizer = load_tokenizer_from_directory(directory)
    text = tokenizer.token_text(64)
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode(text, add_special_tokens=False) == [64]


def test_limits_stored_with_a_tokenizer_are_ignored(directory: Path) -> None:
    edit_tokenizer(
        directory,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
        },
    )  # fmt: skip
    tokenizer = load_tokenizer_from_directory(directory)
    assert tokenizer.decode(tokenizer.encode("the quick dog"), skip_special_tokens=False) == (
        "the quick dog"
    )


def test_added_tokens_of_the_config(directory: Path) -> None:
    plain = load_tokenizer_from_directory(directory)
    new_id = plain.vocab_size
    the = plain.encode("the")[0]
    write(
        directory,
        "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                "2": {"content": "<|im_end|>", "special": True},
                str(new_id): {"content": "<tool>", "special": False},
            },
            "additional_special_tokens": ["the", "not in the vocabulary"],
            "extra_special_tokens": {"image_token": "<tool>"},
        },
    )
    tokenizer = load_tokenizer_from_directory(directory)
    assert tokenizer.encode("<tool>") == [new_id]
    assert tokenizer.vocab_size == new_id + 1
    assert tokenizer.decode([the, new_id]) == ""
    assert tokenizer.decode([the, new_id], skip_special_tokens=False) == "the<tool>"


def test_chat_template_files_by_precedence(directory: Path) -> None:
    named = [{"name": "default", "template": "1"}, {"name": "tool_use", "template": "T"}]
    write(directory, "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer_from_directory(directory).chat_templates == {
        "default": "1",
        "tool_use": "T",
    }
    write(directory, "chat_template.json", {"chat_template": "2"})
    assert load_tokenizer_from_directory(directory).chat_template == "2"
    write(directory, "chat_template.jinja", "3")
    write(directory, "additional_chat_templates/rag.jinja", "R")
    assert load_tokenizer_from_directory(directory).chat_templates == {
        "default": "3",
        "tool_use": "T",
        "rag": "R",
    }
    given = load_tokenizer_from_directory(directory, chat_template="{{ 4 }}")
    assert given.chat_templates == {"default": "{{ 4 }}"}


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "{}", "\0" * 100, '{"model": {"type": "BPE", "vocab": {}}}',
        '{"model": {"type": "Zork"}}', "[" * 100_000,
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        '{"model": {"type": "Unigram", "vocab": [], "unk_id": 5}}',
    ],
)  # fmt: skip
def test_damaged_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    write(tmp_path, "tokenizer.json", content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer_from_directory(tmp_path)


def test_truncated_tokenizer_json_is_named(directory: Path) -> None:
    path = directory / "tokenizer.json"
    data = path.read_bytes()
    for length in range(0, len(data), len(data) // 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
            load_tokenizer_from_directory(directory)


def test_missing_and_oversized_files_are_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*tokenizer\.json: no such file"):
        load_tokenizer_from_directory(directory / "nowhere")
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: \d+ bytes are more than"):
        load_tokenizer_from_directory(directory)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {
            "type": "Sequence",
            "decoders": [{"type": "Strip", "content": " ", "start": 2, "stop": 0}],
        },
        {
            "type": "Sequence",
            "decoders": [{"type": "Strip", "content": " ", "start": 0, "stop": 1}],
        },
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(
    directory: Path, decoder: dict[str, Any]
) -> None:
    edit_tokenizer(directory, decoder=decoder)
    with pytest.raises(CheckpointError, match="cannot be streamed"):
        load_tokenizer_from_directory(directory)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "Fuse"},
        {"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "never", "split": True},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "Ġ"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    ],
)
def test_other_decoders_equal_the_library(directory: Path, decoder: dict[str, Any] | None) -> None:
    edit_tokenizer(directory, decoder=decoder)
    tokenizer = load_tokenizer_from_directory(directory)
    for text in ("the quick brown fox, the dog.", " the", "  a  b", "", "don't !"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "not JSON: it is nested too deeply"),
        ("tokenizer_config.json", "9" * 10_000, "not JSON: it holds an integer of too many digits"),
        ("special_tokens_map.json", "nope", "special_tokens_map.json: not JSON"),
        ("chat_template.json", "nope", "chat_template.json: not JSON"),
        ("chat_template.json", {"chat_template": 3}, "chat_template.json: chat_template must be"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "chat_template must be"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token must be a string"),
        ("tokenizer_config.json", {"eos_token": {"content": []}}, "eos_token must be a string"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": 2}}, r"added_tokens_decoder\['1'"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"99999": {"content": "<new>"}}},
            "'<new>' has id",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "<new>"}}},
            "'<new>' has id",
        ),
        ("tokenizer_config.json", {"extra_special_tokens": 7}, "extra_special_tokens must be"),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": [7]},
            "additional_special_tokens must be",
        ),
    ],
)
def test_damaged_settings_are_named(directory: Path, name: str, content: Any, message: str) -> None:
    write(directory, name, content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer_from_directory(directory)


def test_a_template_file_that_is_no_text_is_named(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load_tokenizer_from_directory(directory)


def test_loading_prints_nothing(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_tokenizer_from_directory(directory)
    assert capfd.readouterr() == ("", "")


def test_long_text_encodes_as_short_text_does(byte_level: Tokenizer) -> None:
    """It takes another way through the library, one that lets other threads run."""
    text = "the cat sat, " * 1000
    direct = byte_level._backend.encode(text, add_special_tokens=False).ids
    assert byte_level.encode(text, add_special_tokens=False) == direct
    assert byte_level.most_characters(len(direct)) >= len(text)
