"""Rows of one stage of the GPU suite, on disk as soon as each is known."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.rows import Origin, append_row, make_row

Results = Mapping[str, object]
_MOST_ERROR_CHARACTERS = 500


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Runs cases and records what each gave, or why it failed, and goes on.

    A row's status is "passed", "timed", "failed" or "skipped".
    """

    stage: str
    origin: Origin
    output: Path | None
    device: Results
    is_simulated: bool
    peaks: dict[str, float] = field(default_factory=dict)
    """What the device was measured to do at most; goes into the rows that follow."""
    failures: int = 0

    def check(self, case: str, parameters: Results, run: Callable[[], object]) -> bool:
        """A row that says whether `run` returned; whether it did."""
        return self._attempt(case, parameters, "passed", lambda: _nothing(run))

    def measure(self, case: str, parameters: Results, run: Callable[[], Results]) -> bool:
        """A row with what `run` measured; whether it could."""
        return self._attempt(case, parameters, "timed", run)

    def skip(self, case: str, reason: str) -> None:
        """A row that says why there is nothing."""
        self.write(case, {}, {"reason": reason}, status="skipped", seconds=0.0)

    def fail(self, case: str, parameters: Results, error: str, seconds: float) -> None:
        """A row for what went wrong."""
        self.failures += 1
        self.write(case, parameters, {"error": error}, status="failed", seconds=seconds)

    def write(
        self, case: str, parameters: Results, results: Results, *, status: str, seconds: float
    ) -> None:
        """Append the row and print it in short."""
        row = make_row(
            self.origin,
            benchmark="gpu",
            case=case,
            parameters=parameters,
            results=results,
            stage=self.stage,
            status=status,
            simulated=self.is_simulated,
            peaks=self.peaks,
            seconds=seconds,
            device=self.device,
            load_before=None,
            other_cores=None,
        )
        append_row(self.output, row)
        shown = ", ".join(f"{name}={_short(value)}" for name, value in row["results"].items())
        print(f"{self.stage}: {case}: {status} {shown}".rstrip(), flush=True)

    def _attempt(
        self, case: str, parameters: Results, status: str, run: Callable[[], Results]
    ) -> bool:
        started = time.perf_counter()
        try:
            results = run()
        except Exception as error:
            # One broken kernel must not take the rest of a rare hour on a GPU with it.
            traceback.print_exc(file=sys.stderr)
            self.fail(case, parameters, error_line(error), time.perf_counter() - started)
            return False
        seconds = time.perf_counter() - started
        self.write(case, parameters, results, status=status, seconds=seconds)
        return True


def error_line(error: BaseException) -> str:
    """The end of the traceback in one line."""
    text = "".join(traceback.format_exception_only(error))
    return " ".join(text.split())[:_MOST_ERROR_CHARACTERS]


def _nothing(run: Callable[[], object]) -> Results:
    run()
    return {}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
