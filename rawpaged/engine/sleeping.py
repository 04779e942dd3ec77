"""When an engine may sleep, and what becomes of it when it cannot wake up."""

from __future__ import annotations

import logging
import traceback

from rawpaged.engine.model_runner import ModelRunner
from rawpaged.errors import (
    BackendError,
    CheckpointError,
    InvalidRequestError,
    SleepError,
    count_of,
)

logger = logging.getLogger(__name__)


def check_may_sleep(level: int, num_requests: int) -> None:
    """Raises InvalidRequestError for levels that there are not, SleepError while there is work."""
    if level not in (1, 2):
        raise InvalidRequestError(f"level must be 1 or 2, not {level}", "level")
    if num_requests > 0:
        raise SleepError(
            f"{count_of(num_requests, 'request')} running or waiting; sleep when all "
            "have ended, or abort them"
        )


def wake_up(runner: ModelRunner) -> None:
    """ModelRunner.wake_up; raises BackendError or CheckpointError, and leaves it asleep."""
    try:
        runner.wake_up()
        return
    except Exception as error:
        # As text: a handler that keeps records must not keep what the frames hold.
        logger.error("waking up failed\n%s", traceback.format_exc())
        kind = CheckpointError if isinstance(error, CheckpointError) else BackendError
        message = f"the engine could not wake up and sleeps on: {error}"
    # Out of the handler, whose traceback holds what has been allocated.
    runner.backend.release_unused()
    raise kind(message)
