"""A step of the engine from its launch to its result, failures included."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from rawpaged.engine.launched_step import LaunchedStep, StepResult
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.errors import count_of
from rawpaged.request import Request
from rawpaged.scheduler.output import SchedulerOutput

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class StepRun:
    """Takes a runner through one step. What fails on the way is logged, and is `failure` then.

    A step that has failed does nothing more, and what it held on the device has been given back.
    """

    def __init__(
        self, runner: ModelRunner, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> None:
        """`requests` are the step's, which keeps them: their names may be used again."""
        self.output = output
        self.requests = requests
        self.failure: str | None = None
        self._runner = runner
        self._launched: LaunchedStep | None = None

    def launch_forward(self) -> None:
        """See ModelRunner.launch_forward."""
        self._launched = self._attempt(
            lambda: self._runner.launch_forward(self.output, self.requests)
        )

    def launch_sampling(self) -> None:
        """See ModelRunner.launch_sampling."""
        step = self._launched
        if step is not None:
            self._attempt(lambda: self._runner.launch_sampling(step))

    def result(self) -> StepResult | None:
        """See ModelRunner.result; None if the step has failed."""
        step, self._launched = self._launched, None
        return None if step is None else self._attempt(lambda: self._runner.result(step))

    def fail(self, message: str) -> None:
        """Go no further, because of something else that has failed."""
        self._launched = None
        self.failure = self.failure or message

    def _attempt(self, work: Callable[[], _T]) -> _T | None:
        try:
            return work()
        except Exception as error:
            num_reqs = len(self.output.scheduled)
            # As text: a handler that keeps records must not keep what the frames hold.
            logger.error(
                "a step of %s failed\n%s", count_of(num_reqs, "request"), traceback.format_exc()
            )
            message = _failure_message(error, num_reqs)
        # Out of the handler, whose traceback holds the step's arrays. A device that cannot even do
        # this is lost, and this engine with it.
        self.fail(message)
        self._runner.backend.release_unused()
        return None


def _failure_message(error: Exception, num_reqs: int) -> str:
    if isinstance(error, MemoryError):
        return (
            f"out of memory in a step of {count_of(num_reqs, 'request')}, all of which have "
            f"failed: {error}; lower max_num_batched_tokens or max_num_seqs, or leave more memory "
            "beside the KV pool"
        )
    return f"the engine failed in this step: {error}"
