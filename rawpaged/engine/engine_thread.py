"""The thread that an engine runs on, and the way in from all others."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rawpaged.engine.admission import Admission
from rawpaged.engine.engine import Engine
from rawpaged.engine.engine_output import EngineOutput
from rawpaged.engine.output_processor import OutputProcessor, Submission, sample_id
from rawpaged.engine.profiling import Profile, ProfileOptions, Profiler
from rawpaged.errors import (
    EngineClosedError,
    EngineSleepingError,
    InvalidRequestError,
    RequestFailedError,
)
from rawpaged.request import FinishReason, Request, RequestGroup
from rawpaged.scheduler.kv_stats import KVStats
from rawpaged.scheduler.pool_snapshot import PoolSnapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Cancel:
    submission: Submission


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do between steps, and where its result or error goes."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = Submission | _Abort | _Cancel | _Call | _Close


class EngineThread:
    """Runs steps while there is work and sleeps otherwise; owns the engine.

    Everything public may be called from any thread. Nothing is shared with the
    engine's thread but the command queue.
    """

    def __init__(self, engine: Engine, processor: OutputProcessor, admission: Admission) -> None:
        self._engine = engine
        self._processor = processor
        self._admission = admission
        self._profiler = Profiler(engine)
        self._on_delivered: Callable[[], None] = _do_nothing
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        # Guards `_closed`, so that nothing is queued behind the closing command, and the count.
        self._lock = threading.Lock()
        self._closed = False
        self._num_submitted = 0
        self._thread = threading.Thread(target=self._run, name="rawpaged-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def set_on_delivered(self, callback: Callable[[], None]) -> None:
        """Have this called on the engine's thread whenever sinks may have been called.

        That is once a step, so that all that a step brought can be sent on together. To be set
        before anything is submitted.
        """
        self._on_delivered = callback

    def submit(self, submission: Submission) -> None:
        """Queue a request that admission has checked; its sink hears of everything later."""
        self._put(submission)

    @property
    def num_queued(self) -> int:
        """Submissions of which nothing has been computed yet."""
        with self._lock:
            return self._num_submitted + self._engine.scheduler.num_queued_groups

    def abort(self, request_id: str) -> None:
        """End a request; unknown or ended ones are none of this call's business."""
        self._commands.put(_Abort(request_id))

    def cancel(self, submission: Submission) -> None:
        """Abort what was submitted, but not another request that has the same name by now."""
        self._commands.put(_Cancel(submission))

    def start_profile(self, options: ProfileOptions) -> Future[int]:
        """Trace steps (`Profiler.start`); the result, the first step traced, comes between steps.

        Raises EngineClosedError.
        """
        started: Future[int] = Future()
        self._put(_Call(lambda: self._profiler.start(options), started))
        return started

    def stop_profile(self) -> Future[Profile]:
        """End the profile, or hear of one that ended by itself (`Profiler.stop`).

        Raises EngineClosedError.
        """
        stopped: Future[Profile] = Future()
        self._put(_Call(self._profiler.stop, stopped))
        return stopped

    def kv_stats(self) -> Future[KVStats]:
        """The KV pool in numbers, taken between steps. Raises EngineClosedError."""
        stats: Future[KVStats] = Future()
        self._put(_Call(self._engine.scheduler.kv_stats, stats))
        return stats

    def pool_snapshot(self) -> Future[tuple[int, PoolSnapshot]]:
        """Who holds which block, and the number of steps run so far. Raises EngineClosedError."""
        scheduler, profiler = self._engine.scheduler, self._profiler
        snapshot: Future[tuple[int, PoolSnapshot]] = Future()
        self._put(_Call(lambda: (profiler.num_steps, scheduler.pool_snapshot()), snapshot))
        return snapshot

    def reset_prefix_cache(self) -> Future[int]:
        """Forget all prefixes between steps; the number of blocks. Raises EngineClosedError."""
        num_blocks: Future[int] = Future()
        self._put(_Call(self._engine.scheduler.reset_prefix_cache, num_blocks))
        return num_blocks

    @property
    def is_sleeping(self) -> bool:
        return self._engine.sleep_level > 0

    def sleep(self, level: int) -> Future[None]:
        """Give memory back between steps (`Engine.sleep`). Raises EngineClosedError."""
        asleep: Future[None] = Future()
        self._put(_Call(lambda: self._engine.sleep(level), asleep))
        return asleep

    def wake_up(self) -> Future[None]:
        """Take the memory again (`Engine.wake_up`). Raises EngineClosedError."""
        awake: Future[None] = Future()
        self._put(_Call(self._engine.wake_up, awake))
        return awake

    def close(self) -> None:
        """Abort what runs, end the thread and free the engine; may be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, command: Submission | _Call) -> None:
        with self._lock:
            if self._closed or not self._thread.is_alive():
                raise EngineClosedError("the engine is closed")
            self._num_submitted += isinstance(command, Submission)
            self._commands.put(command)

    def _run(self) -> None:
        try:
            self._engine.bind_thread()
            while self._take_commands():
                with self._profiler.step():
                    self._deliver(self._engine.step())
        except Exception:
            logger.exception("the engine thread died")
            with self._lock:
                self._closed = True
            self._refuse_queued()
            for request_id in self._processor.request_ids():
                error = RequestFailedError("the engine died; its log tells why")
                self._processor.fail(request_id, error)
        finally:
            self._on_delivered()
            for close in (self._profiler.close, self._engine.close):
                try:
                    close()
                except Exception:
                    # On a device that is lost, nothing can be given back.
                    logger.exception("the engine did not end in order")

    def _take_commands(self) -> bool:
        """Apply what is queued, waiting for it when there is no work; False to end."""
        while True:
            self._on_delivered()
            if not self._engine.has_unfinished():
                if self._commands.empty():
                    self._engine.record_idle()
                command = self._commands.get()
            else:
                try:
                    command = self._commands.get_nowait()
                except queue.Empty:
                    return True
            if isinstance(command, _Close):
                for request_id in self._processor.request_ids():
                    self._abort(request_id)
                self._engine.record_idle()
                return False
            if isinstance(command, _Abort):
                self._abort(command.request_id)
            elif isinstance(command, _Cancel):
                if self._processor.holds(command.submission):
                    self._abort(command.submission.request_id)
            elif isinstance(command, _Call):
                _answer(command)
            else:
                self._start(command)
                with self._lock:
                    self._num_submitted -= 1

    def _start(self, submission: Submission) -> None:
        if self.is_sleeping:
            submission.sink(EngineSleepingError())
            return
        if submission.request_id in self._processor:
            submission.sink(
                InvalidRequestError(f"request_id={submission.request_id!r} is in use", "request_id")
            )
            return
        params = submission.params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._processor.add(submission)
        max_tokens = self._admission.max_tokens(len(submission.prompt_token_ids), params)
        samples = [
            Request(
                sample_id(submission.request_id, index),
                submission.prompt_token_ids,
                params,
                max_tokens=max_tokens,
                eos_token_ids=self._admission.model_config.eos_token_ids,
                # As vLLM: sample i is what a request of its own with seed + i gives.
                seed=seed + index,
                sample_index=index,
                cache_keys=() if params.cache_salt is None else (f"salt={params.cache_salt}",),
                arrival_time=submission.arrival_time,
            )
            for index in range(params.num_samples)
        ]
        self._engine.add_group(
            RequestGroup(samples, priority=params.priority, lockstep=params.use_beam_search)
        )

    def _abort(self, request_id: str) -> None:
        outputs = [
            output
            for name in self._processor.unfinished_samples(request_id)
            if (output := self._engine.finish(name, FinishReason.ABORT)) is not None
        ]
        self._processor.process(outputs)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        with self._engine.tracer.phase("detokenise"):
            for end in self._processor.process(outputs):
                self._engine.finish(end.sample_id, end.reason, end.stop_reason)

    def _refuse_queued(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submission):
                command.sink(EngineClosedError("the engine is closed"))
            elif isinstance(command, _Call) and command.result.set_running_or_notify_cancel():
                command.result.set_exception(EngineClosedError("the engine is closed"))


def _do_nothing() -> None:
    """For sinks that wait for nobody."""


def _answer(call: _Call) -> None:
    """Do it, unless who asked went away; an error is theirs, not the engine's."""
    if not call.result.set_running_or_notify_cancel():
        return
    try:
        call.result.set_result(call.function())
    except Exception as error:
        call.result.set_exception(error)
