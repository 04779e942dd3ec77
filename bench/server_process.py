"""A server that a benchmark starts for itself and stops with SIGTERM."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_POLL_SECONDS = 0.1
_STOP_SECONDS = 30.0
_STDERR = 2


class ServerFailedError(Exception):
    """The server did not come up, or ended by itself; the text says how."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    pid: int
    ready_seconds: float
    """From the start of its process until /health answered."""


@contextmanager
def started_server(command: str, url: str, timeout: float) -> Iterator[RunningServer]:
    """Run `command` without a shell until the block ends; its output goes to standard error.

    Waits until `url`/health answers with 200. Raises ServerFailedError, also if something else
    answers there already.
    """
    if is_healthy(url):
        raise ServerFailedError(f"a server answers at {url} already")
    started = time.monotonic()
    try:
        process = subprocess.Popen(shlex.split(command), stdout=_STDERR, stderr=_STDERR)
    except OSError as error:
        raise ServerFailedError(f"cannot start {command!r}: {error}") from error
    print(f"waiting for {url.rstrip('/')}/health", file=sys.stderr)
    try:
        _wait_until_healthy(process, url, started + timeout)
        yield RunningServer(process.pid, time.monotonic() - started)
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended by itself with {process.returncode}")
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    while not is_healthy(url):
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended with {process.returncode} before serving")
        if time.monotonic() > deadline:
            raise ServerFailedError(f"{url}/health did not answer in time")
        time.sleep(_POLL_SECONDS)


def is_healthy(url: str) -> bool:
    """Whether `url`/health answers with 200 now."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=2) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:  # it is starting or stopping
        error.close()
        return False
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for a server that does not end."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
