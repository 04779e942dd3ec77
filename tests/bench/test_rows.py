"""Rows and tables, percentiles and medians."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.rows import Origin, append_row, command_line, format_table, make_row
from bench.summary import distribution, median_results


def test_a_row_holds_where_it_comes_from_and_is_valid_json(tmp_path: Path) -> None:
    origin = Origin("python -m bench.run x", commit="abc-dirty", machine={"cores": 2})
    row = make_row(
        origin,
        benchmark="ops",
        case="linear/o_proj",
        parameters={"rows": 1, "range": (1, 2)},
        results={"us": 1 / 3, "nan": math.nan, "nested": [{"inf": math.inf}]},
        load_before=0.25,
        other_cores=None,
        peaks={"read": 1e9 / 3},
    )
    path = tmp_path / "new" / "rows.jsonl"
    append_row(path, row)
    append_row(path, row)
    append_row(None, row)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == second == json.loads(json.dumps(row))
    assert first["schema"] == 1
    assert first["results"] == {"us": 0.333333, "nan": None, "nested": [{"inf": None}]}
    assert first["parameters"] == {"rows": 1, "range": [1, 2]}
    assert first["peaks"] == {"read": 333333000.0}
    assert first["commit"] == "abc-dirty"
    assert first["machine"] == {"cores": 2}
    assert first["load_before"] == 0.25
    assert first["other_cores"] is None
    assert first["date"].endswith("+00:00")


def test_the_machine_is_described() -> None:
    machine = Origin("x").machine
    assert {"cpu", "cores", "memory_bytes", "python", "numba"} <= set(machine)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--api-key", "sesame"],
        ["serve", "--api-key=sesame"],
        ["serve", "--server-command", "rawpaged serve m --api-key sesame", "--seed", "1"],
        ["serve", "--server-command", "rawpaged serve m --api-key sesame --port 1"],
    ],
)
def test_api_keys_are_not_in_rows(arguments: list[str]) -> None:
    line = command_line(arguments)
    assert line.startswith("python -m bench.run serve")
    assert "sesame" not in line
    assert line.count("'") % 2 == 0


def test_a_table_lines_up() -> None:
    table = format_table(["op", "n", "us"], [["linear", 5, 12345.6], ["x", None, 0.01234]])
    assert table.splitlines() == [
        "op      n      us",
        "------  -  ------",
        "linear  5   12346",
        "x       -  0.0123",
    ]


def test_distribution_is_in_milliseconds() -> None:
    values = distribution([i / 1000 for i in range(1, 102)])
    assert values == pytest.approx({"mean": 51.0, "p50": 51.0, "p90": 91.0, "p99": 100.0})
    assert distribution([0.002])["p99"] == pytest.approx(2.0)


def test_medians_field_by_field() -> None:
    runs = [
        {"rate": 3.0, "tokens": 8, "errors": 0, "messages": [], "ms": {"p50": 1.0, "p99": None}},
        {"rate": 1.0, "tokens": 8, "errors": 2, "messages": ["b"], "ms": {"p50": 9.0, "p99": 4.0}},
        {"rate": 2.0, "tokens": 7, "errors": 1, "messages": ["c"], "ms": {"p50": 2.0, "p99": 6.0}},
    ]
    assert median_results(runs, summed=["errors"]) == {
        "rate": 2.0,
        "tokens": 8,
        "errors": 3,
        "messages": ["b", "c"],
        "ms": {"p50": 2.0, "p99": 5.0},
    }
    assert median_results([{"x": None}, {"x": None}]) == {"x": None}
    assert median_results([{"n": 4}, {"n": 5}]) == {"n": 4}
