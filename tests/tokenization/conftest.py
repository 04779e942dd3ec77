"""Tiny tokenizers, trained here, that hold every case the real ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rawpaged.tokenization.gguf_tokenizer import load_tokenizer_from_gguf
from rawpaged.tokenization.tokenizer import Tokenizer, load_tokenizer_from_directory

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "A block holds sixteen tokens; the block table says where each block is.",
    "Größe und Länge: déjà vu, naïve café.",
    "日本語のテキストと中文文本。",
    "Emoji 😀😀 family 👨‍👩‍👧 and 👍🏽.",
    "the the the then these there other mother",
]

SPECIALS = ["<unk>", "<s>", "</s>"]


def train_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: merged pieces by score, then single letters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    latin = [text for text in CORPUS if text.isascii()]
    backend.train_from_iterator(latin, trainer)
    pieces = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    pieces = [piece for piece in pieces if len(piece) > 1] + [
        piece for piece in pieces if len(piece) == 1
    ]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIALS, *byte_tokens, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    return train_byte_level()


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but tokenizer.json, not to be written to."""
    directory = tmp_path_factory.mktemp("byte-level")
    train_byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def byte_level(byte_level_directory: Path) -> Tokenizer:
    return load_tokenizer_from_directory(byte_level_directory)


@pytest.fixture
def spm_metadata() -> dict[str, Any]:
    return sentencepiece_metadata()


@pytest.fixture(scope="session")
def spm_table() -> dict[str, Any]:
    """The same, made once, not to be changed."""
    return sentencepiece_metadata()


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return load_tokenizer_from_gguf(sentencepiece_metadata())


@pytest.fixture
def gpt2_metadata(byte_level_backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """GGUF metadata of the byte-level vocabulary, with one more user-defined and unused token."""
    vocabulary = byte_level_backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [left + " " + right for left, right in byte_level_merges(byte_level_backend)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<tool call>", "[PAD]"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3) + [4, 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def byte_level_merges(backend: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [tuple(merge) if isinstance(merge, list) else tuple(merge.split()) for merge in merges]
