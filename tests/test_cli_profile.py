"""rawpaged profile: a workload run, some of its steps traced, tables and a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rawpaged import cli
from rawpaged.cli import main
from rawpaged.engine.op_recording import read_recording
from rawpaged.workload import Workload
from tests.tiny import LLAMA

FLAGS = ["--num-threads", "1", "--num-gpu-blocks-override", "64"]


def profile(*arguments: str) -> int:
    return main(["profile", LLAMA, *FLAGS, *arguments])


def step_events(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "step"]


def test_some_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    workload = "prompts=3,prompt_len=10-20,output_len=100"
    assert profile("--steps", "5-8", "--workload", workload, "--output", str(path)) == 0
    out = capsys.readouterr().out
    assert out.startswith("steps 5-8: 4 in ")
    assert "0 prefill and 12 decode tokens" in out
    for table in ("phase", "op", "op and shape: ", "layer"):
        assert re.search(rf"^{table}", out, re.MULTILINE)
    assert out.rstrip().splitlines()[-1].startswith(f"trace: {path}")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert step_events(path) == [f"step={n} prefill=0 decode=3" for n in (5, 6, 7, 8)]


def test_ops_are_recorded_on_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, ops = tmp_path / "trace.json", tmp_path / "ops of steps.json"
    arguments = ["--workload", "prompts=2,prompt_len=8,output_len=5", "--output", str(trace)]
    assert profile("--steps", "2-3", "--record", str(ops), *arguments) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last == f"ops: {ops} (for python -m bench.run ops --replay '{ops}')"
    recording = read_recording(ops)
    assert [step.name for step in recording.steps] == step_events(trace)


def test_all_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile("--workload", "prompts=2,prompt_len=8,output_len=3") == 0
    assert capsys.readouterr().out.startswith("steps 1-3: 3 in ")
    assert len(step_events(tmp_path / "profile.json")) == 3


def test_fewer_steps_than_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["--workload", "prompts=1,output_len=4", "--output", str(path), "--steps"]
    assert profile(*arguments, "3-9") == 0
    assert capsys.readouterr().out.startswith("steps 3-4: 2 in ")
    path.unlink()
    assert profile(*arguments, "5-9") == 1
    assert "the workload ended before step 5" in capsys.readouterr().err
    assert not path.exists()


def test_too_long_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert profile("--workload", "prompt_len=5000", "--output", str(path)) == 1
    assert "5000" in capsys.readouterr().err
    assert not path.exists()


def test_outputs_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "trace.json"):
        assert profile("--output", str(path)) == 1
        assert f"output={str(path)!r} cannot be written" in capsys.readouterr().err
        assert profile("--record", str(path)) == 1
        assert f"record={str(path)!r} cannot be written" in capsys.readouterr().err
    one = str(tmp_path / "one.json")
    assert profile("--record", one, "--output", one) == 1
    assert "output and record are both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--steps", "0-4", "counted from 1"),
        ("--steps", "9-4", "ends before it begins"),
        ("--steps", "all", "'all'"),
        ("--workload", "batch=3", "'batch' is not one of prompts"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, words: str
) -> None:
    with pytest.raises(SystemExit) as info:
        profile(flag, value)
    assert info.value.code == 2
    assert words in capsys.readouterr().err


def test_defaults() -> None:
    args = cli._parser().parse_args(["profile", LLAMA])
    assert (args.steps, args.workload, args.output) == (None, Workload(), Path("profile.json"))


def test_a_profiler_directory_is_checked_before_loading(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    arguments = ["--port", "0", "--profiler-dir", str(tmp_path / "file" / "traces")]
    assert main(["serve", str(tmp_path / "no-model"), *arguments]) == 1
    assert "profiler_dir" in capsys.readouterr().err
