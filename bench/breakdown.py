"""`bench breakdown`: where the time of an engine's steps goes while a server is under load.

The server runs in this process, the load comes from another. On the engine's thread the functions
that the parts are named for are timed, each without what is timed inside it, so that the parts add
up to the wall time from the first step to the last. What the event loop's thread computes goes on
beside that, and is told as a share of the same time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.machine import usable_cores
from bench.presets import ServeCase
from bench.rows import Origin, append_row, format_table, make_row, read_rows
from rawpaged import AsyncEngine
from rawpaged.config import EngineConfig
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.engine.engine import Engine
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.engine.output_processor import OutputProcessor
from rawpaged.scheduler.scheduler import Scheduler
from rawpaged.server.app import create_app
from rawpaged.server.metrics import PrometheusStats
from rawpaged.server.run import serve_forever

KERNELS, RECORDING, STEP = "kernels", "recording", "rest of step"
_TIMED: tuple[tuple[type, str, str], ...] = (
    (ThreadTeam, "run", KERNELS),
    (ThreadTeam, "replay", KERNELS),
    (ThreadTeam, "record", RECORDING),
    (Scheduler, "schedule", "scheduler"),
    (Scheduler, "advance", "scheduler"),
    (Scheduler, "complete", "scheduler"),
    (ModelRunner, "launch_forward", "batch"),
    (ModelRunner, "launch_sampling", "sampling"),
    (ModelRunner, "result", "sampling"),
    (Engine, "step", STEP),
    (OutputProcessor, "process", "output"),
)
"""A class, its method that is timed, and the part it counts for."""
BETWEEN = "between steps"
PARTS = (*dict.fromkeys(part for _, _, part in _TIMED), BETWEEN)

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownOptions:
    """What `bench breakdown` was asked for."""

    model: str
    cases: Sequence[ServeCase]
    dtype: str = "auto"
    num_threads: int | None = None
    token_ids: str = "1000:30000"
    output: Path | None = None


class PartsClock:
    """Seconds of one thread in nested parts, each without those inside it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._open: list[str] = []
        self._thread: int | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew with the next step."""
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        """Without what lies between steps."""
        self.num_steps = 0
        self.first: float | None = None
        self.last = 0.0

    @property
    def wall(self) -> float:
        """From the first step's beginning to the end of what came last."""
        return self.last - (self.first or self.last)

    def shares(self) -> dict[str, float]:
        """Of the wall time, by part."""
        between = self.wall - sum(self.seconds.values())
        return {
            part: (between if part == BETWEEN else self.seconds[part]) / self.wall
            for part in PARTS
        }

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, counted for a part where it is called by the thread that makes steps."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if part == STEP and not self._open:
                self._begin_step()
            # While calls are recorded none is made.
            is_other = threading.get_ident() != self._thread or self.first is None
            if is_other or self._open[-1:] == [RECORDING]:
                return function(*args, **kwargs)
            self._switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return call

    def _begin_step(self) -> None:
        self._thread = threading.get_ident()
        self.num_steps += 1
        if self.first is None:
            self.first = self.last = self._now()

    def _switch(self) -> None:
        """Count the time since the last switch for the innermost part."""
        now = self._now()
        if self._open:
            self.seconds[self._open[-1]] += now - self.last
        self.last = now


def run_breakdown(options: BreakdownOptions, origin: Origin) -> int:
    """Measure each case, append a row for each, print them; returns the number of errors."""
    clock = PartsClock()
    config = EngineConfig(
        model=options.model, dtype=options.dtype, num_threads=options.num_threads
    )
    rows = []
    with _timed_functions(clock), _served(config) as server:
        for case in options.cases:
            rows.append(_measure(case, options, origin, clock, server))
            append_row(options.output, rows[-1])
    print(results_table(rows))
    return sum(row["results"]["errors"] for row in rows)


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a case: per cent of the wall time."""
    headers = ["case", "out tok/s", "steps", "ms a step", *PARTS, "outside kernels", "beside: HTTP"]
    lines = []
    for row in rows:
        results = row["results"]
        line = [row["case"], results["output_tokens_per_s"], results["steps"]]
        line += [1e3 * results["wall_s"] / results["steps"]]
        line += [100 * results["shares"][part] for part in PARTS]
        line += [100 * (1 - results["shares"][KERNELS]), 100 * results["http_cpu_share"]]
        lines.append(line)
    return format_table(headers, lines) + "\n(per cent of the time from the first step to the last)"


@dataclass(frozen=True, slots=True)
class _Server:
    url: str
    thread: threading.Thread

    def cpu_seconds(self) -> float:
        """That the event loop's thread has computed."""
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))


@contextmanager
def _timed_functions(clock: PartsClock) -> Iterator[None]:
    with ExitStack() as patches:
        for owner, name, part in _TIMED:
            timed = clock.timed(getattr(owner, name), part)
            patches.enter_context(patch.object(owner, name, timed))
        yield


@contextmanager
def _served(config: EngineConfig) -> Iterator[_Server]:
    """A server in a thread of its own, without access to signals."""
    stats = PrometheusStats(config.model)
    with AsyncEngine(config, stats_logger=stats) as engine:
        app = create_app(engine, served_model_names=[config.model], stats=stats)
        ready, ended = threading.Event(), asyncio.Event()
        urls: list[str] = []
        loops: list[asyncio.AbstractEventLoop] = []

        def on_ready(url: str) -> None:
            urls.append(url)
            ready.set()

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await serve_forever(
                app,
                host="127.0.0.1",
                port=0,
                on_ready=on_ready,
                stop=ended,
                hurry=ended,
                shutdown_timeout=0,
            )

        failures: list[Exception] = []

        def run() -> None:
            try:
                asyncio.run(serve())
            except Exception as error:  # told by the thread that waits
                failures.append(error)

        thread = threading.Thread(target=run, name="bench-server")
        thread.start()
        try:
            while not ready.wait(_POLL_SECONDS):
                if failures:
                    raise failures[0]
            yield _Server(urls[0], thread)
        finally:
            if thread.is_alive():
                loops[0].call_soon_threadsafe(ended.set)
            thread.join()


def _measure(
    case: ServeCase,
    options: BreakdownOptions,
    origin: Origin,
    clock: PartsClock,
    server: _Server,
) -> dict[str, Any]:
    _load(case, options, server.url)  # the first time compiles and records
    clock.reset()
    before = server.cpu_seconds()
    served = _load(case, options, server.url)
    shares = clock.shares()
    return make_row(
        origin,
        benchmark="breakdown",
        case=case.name,
        parameters={
            **{key: value for key, value in asdict(case).items() if key != "name"},
            "model": options.model,
            "dtype": options.dtype,
            "threads": options.num_threads or usable_cores(),
        },
        results={
            "errors": served["results"]["errors"],
            "output_tokens_per_s": served["results"]["output_tokens_per_s"],
            "total_tokens_per_s": served["results"]["total_tokens_per_s"],
            "steps": clock.num_steps,
            "wall_s": clock.wall,
            "shares": shares,
            "http_cpu_share": (server.cpu_seconds() - before) / clock.wall,
        },
        handover_ns=served["handover_ns"],
        load_before=served["load_before"],
        other_cores=None,
    )


def _load(case: ServeCase, options: BreakdownOptions, url: str) -> dict[str, Any]:
    """The row of `bench serve` from a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "rows.jsonl"
        flags = {
            "--num-requests": case.num_requests,
            "--concurrency": case.concurrency,
            "--prompt-len": case.prompt_len,
            "--output-len": case.output_len,
            "--shared-prefix-len": case.shared_prefix_len,
            "--warm-up-requests": 0,
            "--token-ids": options.token_ids,
            "--output": output,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        command = [sys.executable, "-m", "bench.run", "serve", "--url", url, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            raise ValueError(f"the load did not run: {done.stderr.strip()}")
        return read_rows(output)[-1]
