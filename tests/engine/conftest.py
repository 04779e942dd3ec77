"""Engines over the tiny Llama with a tokenizer, shared by tests that only use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rawpaged import LLM, AsyncEngine
from tests.tiny import tiny_config, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def llm(tokenizer_directory: Path) -> Iterator[LLM]:
    with LLM(tiny_config(tokenizer=str(tokenizer_directory))) as opened:
        yield opened


@pytest.fixture(scope="session")
def async_engine(tokenizer_directory: Path) -> Iterator[AsyncEngine]:
    with AsyncEngine(tiny_config(tokenizer=str(tokenizer_directory))) as opened:
        yield opened
