"""Profiles of a running engine: which steps are traced, and where their ranges go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rawpaged.engine.engine import Engine
from rawpaged.engine.op_recorder import OpRecorder
from rawpaged.engine.op_recording import write_recording
from rawpaged.errors import ProfileError, RecordingError, TraceFileError
from rawpaged.tracing import Range, RangeRecorder, Tracer, write_chrome_trace

logger = logging.getLogger(__name__)

MAX_RANGES = 250_000
"""Ranges after which a profile ends by itself: about 40 MB of JSON, and a second to write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Which steps to trace. Raises ProfileError for numbers that name none."""

    path: Path | None = None
    """Where the Chrome trace is written when the profile ends."""
    record_path: Path | None = None
    """Where the recording of the steps' ops is written (`op_recording.py`); None: none is made."""
    first_step: int | None = None
    """Steps are counted from 1 since the engine was made; None: the next one."""
    num_steps: int | None = None
    """None: until it is stopped."""
    on_end: Callable[[], None] | None = None
    """Called on the engine's thread when the last step is over; must not block."""

    def __post_init__(self) -> None:
        for name, value in (("first_step", self.first_step), ("num_steps", self.num_steps)):
            if value is not None and value < 1:
                raise ProfileError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile that has ended."""

    path: Path | None
    """The Chrome trace; None if there are no steps in it or none was wanted."""
    record_path: Path | None
    """The recording of ops, likewise."""
    first_step: int
    num_steps: int
    """0 if it was stopped before `first_step` came."""
    is_truncated: bool
    """Whether it ended by itself because it held MAX_RANGES ranges, or a recording MAX_NUMBERS."""
    ranges: list[Range]


@dataclass(frozen=True, slots=True)
class _Tracing:
    """What is there only while steps are traced."""

    tracer: Tracer
    recorder: RangeRecorder
    ops: OpRecorder | None
    started: float

    def is_full(self, max_ranges: int) -> bool:
        """Whether no further step should be traced."""
        return len(self.recorder) >= max_ranges or (self.ops is not None and self.ops.is_full)


class Profiler:
    """Counts an engine's steps and traces some of them; lives on the engine's thread.

    The engine is traced from the beginning of a step to the end of a later one, so ranges are
    whole, and its ops are those of the bare backend before and after.
    """

    def __init__(self, engine: Engine, *, max_ranges: int = MAX_RANGES) -> None:
        self.num_steps = 0
        self._engine = engine
        self._max_ranges = max_ranges
        self._options: ProfileOptions | None = None
        """Of the profile that runs or waits for its first step."""
        self._first_step = 0
        self._tracing: _Tracing | None = None
        self._ended: Profile | TraceFileError | None = None
        """What the last profile came to, until someone asks for it or starts another."""

    def start(self, options: ProfileOptions) -> int:
        """Trace from `first_step` on, which is returned; raises ProfileError if it cannot."""
        if self._options is not None:
            raise ProfileError(f"a profile from step {self._first_step} on is running; stop it")
        first_step = options.first_step or self.num_steps + 1
        if first_step <= self.num_steps:
            raise ProfileError(f"first_step={first_step} is over; {self.num_steps} steps have run")
        self._options = options
        self._first_step = first_step
        self._ended = None
        return first_step

    def stop(self) -> Profile:
        """End the profile, or tell of the one that has ended by itself.

        Raises ProfileError if there is neither, TraceFileError if its file was not written.
        """
        if self._options is not None:
            self._end(self._options)
        ended, self._ended = self._ended, None
        if ended is None:
            raise ProfileError("no profile is running")
        if isinstance(ended, TraceFileError):
            raise ended
        return ended

    def close(self) -> None:
        """End what runs; its file is written."""
        if self._options is not None:
            self._end(self._options)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step of the engine, from scheduling to the delivery of its tokens."""
        self.num_steps += 1
        options = self._options
        if options is None or self.num_steps < self._first_step:
            yield
            return
        if self._tracing is None:
            self._tracing = self._install(options)
        with self._tracing.tracer.step(self.num_steps):
            yield
        if self.num_steps - self._first_step + 1 == options.num_steps:
            self._end(options)
        elif self._tracing.is_full(self._max_ranges):
            self._end(options, is_truncated=True)

    def _install(self, options: ProfileOptions) -> _Tracing:
        recorder = RangeRecorder()
        runner = self._engine.runner
        ops = None
        if options.record_path is not None:
            ops = OpRecorder(runner.backend, lambda: runner.kv_caches)
        device_sink = runner.backend.start_profiler()
        # The recorder is entered last, so that its times hold nothing of the other sinks.
        sinks = [sink for sink in (device_sink, ops, recorder) if sink is not None]
        tracer = Tracer(sinks)
        self._engine.set_tracer(tracer, ops)
        return _Tracing(tracer, recorder, ops, time.time())

    def _end(self, options: ProfileOptions, *, is_truncated: bool = False) -> None:
        self._options = None
        tracing, self._tracing = self._tracing, None
        if tracing is None:
            self._ended = Profile(
                path=None,
                record_path=None,
                first_step=self._first_step,
                num_steps=0,
                is_truncated=False,
                ranges=[],
            )
        else:
            self._engine.set_tracer(Tracer())
            self._engine.runner.backend.stop_profiler()
            profile = Profile(
                path=options.path,
                record_path=options.record_path,
                first_step=self._first_step,
                num_steps=self.num_steps - self._first_step + 1,
                is_truncated=is_truncated,
                ranges=tracing.recorder.ranges(),
            )
            self._ended = self._write(profile, tracing)
        if options.on_end is not None:
            options.on_end()

    def _write(self, profile: Profile, tracing: _Tracing) -> Profile | TraceFileError:
        """What comes of the profile once its files are written."""
        for path, write in ((profile.path, self._write_trace), (profile.record_path, _write_ops)):
            if path is None:
                continue
            try:
                write(path, profile, tracing)
            except (OSError, RecordingError) as error:
                reason = getattr(error, "strerror", None) or error
                message = f"{path.name} could not be written: {reason}"
                logger.error("%s", message)
                return TraceFileError(message)
            logger.info("%d steps from %d on: %s", profile.num_steps, profile.first_step, path)
        return profile

    def _write_trace(self, path: Path, profile: Profile, tracing: _Tracing) -> None:
        backend = self._engine.runner.backend
        about = {
            "device": backend.name,
            "dtype": backend.dtype,
            "started_unix_seconds": tracing.started,
        }
        write_chrome_trace(path, profile.ranges, about)


def _write_ops(path: Path, profile: Profile, tracing: _Tracing) -> None:
    assert tracing.ops is not None, "no ops were recorded"
    write_recording(path, tracing.ops.recording())
