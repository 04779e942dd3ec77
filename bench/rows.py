"""A measurement as one line of JSON, and several as a table (README.md explains the fields)."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.machine import describe_machine, git_commit

SCHEMA = 1
"""Raised when a field changes its meaning; new fields may come without."""

_SECRET = re.compile(r"(--api-key)([= ]\s*)[^\s']+")


@dataclass(frozen=True, slots=True)
class Origin:
    """What all rows of one invocation share."""

    command: str
    commit: str = field(default_factory=git_commit)
    machine: Mapping[str, object] = field(default_factory=describe_machine)


def command_line(arguments: Sequence[str], *, program: str = "bench.run") -> str:
    """The driver's command as a shell would take it, without API keys."""
    return _SECRET.sub(r"\1\2***", shlex.join(["python", "-m", program, *arguments]))


def make_row(
    origin: Origin,
    *,
    benchmark: str,
    case: str,
    parameters: Mapping[str, object],
    results: Mapping[str, object],
    load_before: float | None,
    other_cores: float | None,
    **more: object,
) -> dict[str, Any]:
    """One row; floats are cut to six significant digits, NaN becomes null."""
    row = {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "case": case,
        "parameters": parameters,
        "results": results,
        **more,
        "load_before": load_before,
        "other_cores": other_cores,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": origin.commit,
        "command": origin.command,
        "machine": origin.machine,
    }
    plain: dict[str, Any] = _plain(row)
    return plain


def append_row(path: Path | None, row: Mapping[str, Any]) -> None:
    """Add one line to the file, which comes to be with its folder; None: nowhere."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under their headers, the first flush left, the others flush right."""
    cells = [list(headers), *([_show(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headers))]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _show(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
