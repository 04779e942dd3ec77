"""Traces of lengths: three formats, and files that nobody should trust."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.capacity import trace
from bench.capacity.lengths import RequestSize
from bench.capacity.trace import read_trace
from rawpaged.errors import ConfigError

SIZES = [RequestSize(161, 338), RequestSize(19, 58)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.json",
            '[{"prompt_len": 161, "output_len": 338}, {"prompt_len": 19, "output_len": 58}]',
        ),
        ("a.json", "[[161, 338], [19, 58]]"),
        ("a.jsonl", '{"prompt_len": 161, "output_len": 338, "id": "x"}\n\n[19, 58]\n'),
        ("a.csv", "prompt_len,output_len\n161,338\n19,58\n"),
        ("a.csv", 'when,output_len , prompt_len\r\n"1,5",338,161\r\n2, 58 ,19'),
        ("a.csv", "\ufeffprompt_len,output_len\n161,338\n\n19,58\n"),
    ],
)
def test_formats(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert read_trace(path, longest=2048) == SIZES


def test_other_column_names(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,161,338\n2023,19,58\n")
    assert read_trace(path, ("ContextTokens", "GeneratedTokens"), longest=2048) == SIZES


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "", "the file is not valid JSON"),
        ("a.json", "{}", "holds no JSON list"),
        ("a.json", "[]", "holds no requests"),
        ("a.json", "[1]", "entry 0: 1 is neither an object with prompt_len and output_len nor"),
        ("a.json", "[[1, 2, 3]]", "neither an object"),
        ("a.json", '[{"prompt_len": 1}]', "entry 0: has no 'output_len'; --trace-columns"),
        ("a.json", "[[1, 1.5]]", "output_len=1.5 is no whole number"),
        ("a.json", "[[true, 1]]", "prompt_len=True is no whole number"),
        ("a.json", "[[1, NaN]]", "output_len=nan is no whole number"),
        ("a.json", '[["1", 1]]', "prompt_len='1' is no whole number"),
        ("a.json", "[[0, 1]]", "entry 0: prompt_len=0 is no whole number of at least 1"),
        ("a.json", "[[5, -1]]", "output_len=-1 is no whole number of at least 1"),
        ("a.json", "[[5, null]]", "output_len=None is no whole number"),
        ("a.json", "[[1, 1], [2000, 49]]", "entry 1: 2000 . 49 tokens are more than max_model_len"),
        ("a.json", "[[1, 1" + "0" * 5000 + "]]", "an integer of too many digits"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", '[{"prompt_len": 1, "prompt_len": 2, "output_len": 1}]', "is given twice"),
        ("a.jsonl", '[1, 2]\n{"prompt_len": 1,\n', "line 2 is not valid JSON"),
        ("a.csv", "", "the first line names 'prompt_len' 0 times"),
        ("a.csv", "161,338\n", "the first line names 'prompt_len' 0 times"),
        ("a.csv", "prompt_len,prompt_len,output_len\n", "names 'prompt_len' 2 times"),
        ("a.csv", "prompt_len,output_len\n", "holds no requests"),
        ("a.csv", "prompt_len,output_len\n1\n", "line 2: 1 columns, not 2"),
        ("a.csv", "prompt_len,output_len\n1,2\n1,x\n", "line 3: output_len='x' is no whole"),
        ("a.csv", "prompt_len,output_len\n1,1e3\n", "output_len='1e3' is no whole number"),
        ("a.csv", "prompt_len,output_len\n1,\u0663\n", "is no whole number"),
        ("a.csv", "prompt_len,output_len\n1," + "9" * 4000 + "\n", "is no whole number"),
        ("a.csv", 'prompt_len,output_len\n1,"2\n', "is not valid CSV"),
        ("a.csv", "prompt_len,output_len\n1," + "9" * 200_000 + "\n", "is not valid CSV"),
        ("a.txt", "1 2", "ends in none of .json, .jsonl, .csv"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match=message) as raised:
        read_trace(path, longest=2048)
    assert len(str(raised.value)) < 500 + len(str(path))


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.json", longest=2048)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_trace(tmp_path / "folder.json", longest=2048)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.csv")
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_trace(tmp_path / "pipe.csv", longest=2048)
    (tmp_path / "bytes.json").write_bytes(b"[[1, 2]]\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "bytes.json", longest=2048)
    (tmp_path / "long.json").write_text("[[1, 1], [1, 1], [1, 1]]")
    monkeypatch.setattr(trace, "MAX_REQUESTS", 2)
    with pytest.raises(ConfigError, match="more than 2 requests"):
        read_trace(tmp_path / "long.json", longest=2048)
    monkeypatch.setattr(trace, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="is larger than 10 bytes"):
        read_trace(tmp_path / "long.json", longest=2048)
