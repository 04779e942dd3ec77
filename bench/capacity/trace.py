"""Reads a trace of request lengths that a user names: JSON, JSON lines or CSV.

    [{"prompt_len": 161, "output_len": 338}, ...]        or  [[161, 338], ...]
    {"prompt_len": 161, "output_len": 338}               a line each
    prompt_len,output_len                                a header, then numbers

Other names of the two columns may be given; further columns are left alone. Nothing in the file is
trusted: what is no trace is refused with the place in the file and the value.
"""

from __future__ import annotations

import csv
import io
import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.capacity.lengths import RequestSize
from rawpaged.errors import ConfigError
from rawpaged.models.fields import json_complaint, show
from rawpaged.weights.files import unique_keys

COLUMNS = ("prompt_len", "output_len")
MAX_BYTES = 64 * 2**20
MAX_REQUESTS = 1_000_000
SUFFIXES = (".json", ".jsonl", ".csv")


def read_trace(path: Path, columns: Sequence[str] = COLUMNS, *, longest: int) -> list[RequestSize]:
    """The sizes in the file's order; prompt and output together hold at most `longest` tokens.

    Raises ConfigError for a file that is missing, too large, or holds anything else.
    """
    text = _text_of(path)
    entries = _csv(path, text, columns) if path.suffix == ".csv" else _json(path, text, columns)
    sizes: list[RequestSize] = []
    for place, values in entries:
        if len(sizes) == MAX_REQUESTS:
            raise ConfigError(f"{path}: holds more than {MAX_REQUESTS} requests")
        sizes.append(_size(path, place, columns, values, longest))
    if not sizes:
        raise ConfigError(f"{path}: holds no requests")
    return sizes


def _text_of(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: ends in none of {', '.join(SUFFIXES)}")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes")
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _json(path: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[str, Sequence[object]]]:
    if path.suffix == ".jsonl":
        lines = text.split("\n")
        entries = [
            (f"line {number}", _parse(path, f"line {number}", line))
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    else:
        whole = _parse(path, "the file", text)
        if not isinstance(whole, list):
            raise ConfigError(f"{path}: holds no JSON list")
        entries = [(f"entry {index}", entry) for index, entry in enumerate(whole)]
    for place, entry in entries:
        if isinstance(entry, dict):
            yield place, [_named(path, place, entry, column) for column in columns]
        elif isinstance(entry, list) and len(entry) == 2:
            yield place, entry
        else:
            raise ConfigError(
                f"{path}: {place}: {show(entry)} is neither an object with {' and '.join(columns)} "
                "nor a list of two numbers"
            )


def _named(path: Path, place: str, entry: dict[str, object], column: str) -> object:
    if column not in entry:
        raise ConfigError(f"{path}: {place}: has no {column!r}; --trace-columns names the columns")
    return entry[column]


def _parse(path: Path, place: str, text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {place} is not valid JSON: {json_complaint(error)}") from None


def _csv(path: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[str, Sequence[object]]]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        for column in columns:
            if header.count(column) != 1:
                raise ConfigError(
                    f"{path}: the first line names {column!r} {header.count(column)} times, not "
                    "once; --trace-columns names the columns"
                )
        places = [header.index(column) for column in columns]
        for row in rows:
            if not row:
                continue
            where = f"line {rows.line_num}"
            if len(row) != len(header):
                raise ConfigError(f"{path}: {where}: {len(row)} columns, not {len(header)}")
            yield where, [_number(row[place]) for place in places]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {rows.line_num}: is not valid CSV: {error}") from None


def _number(text: str) -> object:
    """The integer that a cell holds, else the cell."""
    text = text.strip()
    is_number = text.isascii() and text.isdecimal() and len(text) <= 18
    return int(text) if is_number else text


def _size(
    path: Path, place: str, columns: Sequence[str], values: Sequence[object], longest: int
) -> RequestSize:
    lengths: list[int] = []
    for column, value in zip(columns, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{path}: {place}: {column}={show(value)} is no whole number of at least 1"
            )
        lengths.append(value)
    if sum(lengths) > longest:
        raise ConfigError(
            f"{path}: {place}: {show(lengths[0])} + {show(lengths[1])} tokens are more than "
            f"max_model_len={longest}; --max-model-len raises it"
        )
    return RequestSize(lengths[0], lengths[1])
