"""The command: experiments of a small size, tables, plots and rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.capacity import __main__ as command
from bench.capacity.__main__ import main, run_all
from bench.capacity.experiments import (
    BLOCK_SIZES,
    Settings,
    Workload,
    crossing,
    preemption_cost,
    systems,
)
from bench.capacity.lengths import ALPACA, SHAREGPT
from bench.capacity.rows import write_rows
from bench.capacity.tables import Results, all_tables, insert_tables, write_tables
from bench.rows import Origin

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def results() -> Results:
    workloads = [
        Workload(dataset.name, dataset.draw(count, 0), dataset.draw(10, 0), rate)
        for dataset, count, rate in ((SHAREGPT, 100, 2.0), (ALPACA, 500, 30.0))
    ]
    return run_all(Settings(workloads), with_sensitivity=True, seen=100)


def cells(table: str, row: str) -> list[str]:
    """The cells of the row that begins with `row`."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {row} |")]
    assert len(lines) == 1, f"{row} is there {len(lines)} times in\n{table}"
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def test_tables_say_what_was_found_and_what_the_paper_has(results: Results) -> None:
    tables = all_tables(results)
    found = results.systems["ShareGPT"]["Orca (Pow2)"]
    shares = found.full.shares
    row = cells(tables["memory-ShareGPT"], "Orca (Pow2)")
    assert row[1] == f"{100 * shares.token_states:.1f} (26.8)"
    assert row[4] == f"{100 * (shares.rounding + shares.unusable):.1f} (41.6)"
    assert "(" not in cells(tables["memory-Alpaca"], "Orca (Pow2)")[1]
    row = cells(tables["batched"], "paged")
    paged = results.systems["ShareGPT"]["paged"]
    assert paged.offered is not None
    assert row[1:4] == [f"{paged.full.mean_batch:.1f}", f"{paged.offered.mean_batch:.1f}", "30.42"]
    assert cells(tables["rates"], "FasterTransformer")[3] == "up to 22x"
    saving = results.samples["Alpaca"][4, 0].saving(results.num_blocks)
    assert f"| Alpaca | 4 | {100 * saving:.1f} | 8.5 |" in tables["samples"]
    by_prefix = [
        results.beams["ShareGPT"][6, prefix_len].saving(results.num_blocks)
        for prefix_len in (80, 341)
    ]
    beams = next(line for line in tables["beams"].splitlines() if "| ShareGPT | 6 |" in line)
    assert beams.endswith(f"| {100 * by_prefix[0]:.1f} | {100 * by_prefix[1]:.1f} |")
    assert set(tables) == {
        *("memory-ShareGPT", "memory-Alpaca", "batched", "rates", "samples", "beams"),
        *("block-sizes", "preemption-cost", "preemption", "sensitivity"),
    }


def test_the_order_of_the_systems_is_the_papers(results: Results) -> None:
    """What must come out whatever the lengths: each system wastes less than the one before."""
    for by_system in results.systems.values():
        names = ["FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged"]
        shares = [by_system[name].full.shares.token_states for name in names]
        assert shares == sorted(shares)
        pages = [by_system[f"vAttention {page}"] for page in ("2 MB", "128 KB", "64 KB")]
        shares = [result.full.shares.of_taken for result in pages]
        assert shares == sorted(shares)
        assert by_system["Orca (Oracle)"].full.shares.internal == 0
        assert by_system["paged"].full.shares.rounding == 0


def test_tables_go_between_their_marks(tmp_path: Path) -> None:
    document = "# A\n\n<!-- table: one -->\nold\n<!-- end -->\n\ntext\n"
    tables = {"one": "| 1 | \\g<0> |", "two": "| 2 |"}
    text = insert_tables(document, tables)
    assert text.startswith("# A\n\n<!-- table: one -->\n| 1 | \\g<0> |\n<!-- end -->\n\ntext\n")
    assert "## two\n\n<!-- table: two -->\n| 2 |\n<!-- end -->" in text
    assert insert_tables(text, tables) == text
    write_tables(tmp_path / "new.md", tables)
    assert "| 2 |" in (tmp_path / "new.md").read_text()


def test_rows(results: Results, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", Origin("python -m bench.capacity"), results)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    # 8 systems, 9 block sizes in 2 modes, samples and beams of so many widths and prefixes.
    assert len(rows) == 2 * (8 + 2 * 9 + (4 + 3) * 3)
    row = next(row for row in rows if row["case"] == "Alpaca: system Orca (Oracle)")
    assert row["benchmark"] == "capacity"
    assert row["results"]["full"]["shares"]["internal"] == 0
    assert row["parameters"]["mean_output_len"] == pytest.approx(58, rel=0.05)
    assert len({row["case"] for row in rows}) == len(rows)


def test_plots(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra bench")
    from matplotlib.image import imread

    from bench.capacity.plots import write_plots

    paths = write_plots(tmp_path / "first", results)
    assert len(paths) == 6
    for path in paths:
        pixels = imread(path)
        assert pixels.shape[1] > 900
        assert pixels[0, 0].tolist() == [1, 1, 1, 1], "white and opaque"
        assert pixels[..., :3].min() == 0
    again = write_plots(tmp_path / "second", results)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_a_trace_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "my | trace.csv"
    lines = [f"{20 + index % 7},{5 + index % 11}" for index in range(120)]
    trace.write_text("in,out\n" + "\n".join(lines))
    command = ["--trace", str(trace), "--trace-columns", "in,out", "--no-plots"]
    command += ["--out", str(tmp_path / "out"), "--output", str(tmp_path / "rows.jsonl")]
    assert main([*command, "--kv-gib", "0.5", "--max-model-len", "64"]) == 0
    text = (tmp_path / "out" / "capacity.md").read_text()
    assert "<!-- table: memory-trace my_trace -->" in text
    assert "sensitivity" not in text
    assert text.count("| paged |") == 3
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 8 + 18 + 21
    printed = capsys.readouterr().out
    assert "| Orca (Max) |" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "99"], "--requests 99 must be from 100 to 200000"),
        (["--latency-bound", "nan"], "--latency-bound nan must be"),
        (["--kv-gib", "-1"], "--kv-gib -1.0 must be"),
        (["--kv-gib", "0.001"], "never fits the memory of 1 slots"),
        (["--max-model-len", "2047"], "give a --trace"),
        (["--trace", "none.json"], "cannot be read"),
        (["--trace", "none.json", "--trace-columns", "a"], "--trace-columns 'a' are not two names"),
        (["--seed", "-1"], "--seed -1 must be from 0"),
    ],
)
def test_what_cannot_be_honoured(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_too_few_requests_to_fill_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "few.json"
    trace.write_text("[[20, 5], [3, 3]]")
    assert main(["--trace", str(trace)]) == 2
    assert "the memory holds most of the 2 requests at once" in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "pip install 'rawpaged[bench]', or --no-plots" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_where_a_curve_reaches_the_bound() -> None:
    curve = [(1.0, 0.1), (2.0, 0.1), (3.0, 0.3), (4.0, 9.0)]
    assert crossing(curve, 0.2) == pytest.approx(2.5)
    assert crossing(curve, 0.05) == 0.0
    assert crossing(curve[:2], 0.2) is None


def test_the_document_is_what_the_command_makes() -> None:
    """What takes no time to compute anew; the rest is made by the same run."""
    document = (DOCS / "capacity.md").read_text(encoding="utf-8")
    shown = {
        name: table
        for name, table in re.findall(
            r"<!-- table: (\S+) -->\n(.*?)\n<!-- end -->", document, flags=re.DOTALL
        )
    }
    settings = Settings([])
    costs = {size: preemption_cost(settings.step_model, size) for size in BLOCK_SIZES}
    for size, cost in costs.items():
        row = cells(shown["preemption-cost"], str(size))
        assert row[1] == f"{1e3 * cost.swap_out:.1f}"
        assert row[5:] == [
            f"{1e3 * cost.recompute_alone:.1f}",
            f"{1e3 * cost.recompute_beside:.1f}",
        ]
    for dataset, count in ((SHAREGPT, 1500), (ALPACA, 7500)):
        workload = Workload(dataset.name, dataset.draw(count, 0), ())
        for name in ("FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)"):
            made = settings.simulate(systems(settings.step_model)[name], workload)
            cell = cells(shown[f"memory-{dataset.name}"], name)[1]
            assert cell.split(" ")[0] == f"{100 * made.shares.token_states:.1f}", name
    for image in re.findall(r"\]\((images/\S+\.png)\)", document):
        assert (DOCS / image).stat().st_size > 10_000
