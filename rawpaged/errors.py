"""Every exception this package raises on purpose.

RawpagedError
├── ConfigError             a flag or constructor argument cannot be honoured
├── CheckpointError         a model file is missing, damaged or of an unknown kind
├── BackendError            the device asked for is not there or too small
├── InvalidRequestError     one request is wrong: HTTP 400, names the field
├── QueueFullError          too many requests wait already: HTTP 503
├── EngineClosedError       the engine is closed or shutting down: HTTP 503
├── EngineSleepingError     the engine sleeps, and nobody has woken it yet: HTTP 503
├── SleepError              the engine cannot go to sleep now: HTTP 409
├── RequestFailedError      one request failed inside the engine: HTTP 500
├── ProfileError            a profile cannot start or stop now: HTTP 409
├── TraceFileError          a profile's trace could not be written: HTTP 500
└── RecordingError          a recording of ops cannot be written, read or replayed
"""

from __future__ import annotations


class RawpagedError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user."""


class ConfigError(RawpagedError, ValueError):
    """A flag or constructor argument cannot be honoured; the text names it and the limit."""


class CheckpointError(RawpagedError):
    """A checkpoint cannot be used; the text names the file and, where there is one, the tensor."""


class BackendError(RawpagedError):
    """The device is missing, or has too little memory for what was asked."""


class InvalidRequestError(RawpagedError, ValueError):
    """One request is wrong. `param` names the offending field, or is None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RawpagedError):
    """As many requests wait as may; the text tells how many."""


class EngineClosedError(RawpagedError):
    """The engine no longer takes requests."""


class EngineSleepingError(RawpagedError):
    """The engine has given its memory back and takes no requests before it is woken."""

    def __init__(self) -> None:
        super().__init__("the engine sleeps: wake it with POST /wake_up, or wake_up() in Python")


class SleepError(RawpagedError):
    """The engine cannot go to sleep now; the text says why."""


class RequestFailedError(RawpagedError):
    """The engine could not finish a request that had been accepted; others go on."""


class ProfileError(RawpagedError):
    """A profile cannot be started or stopped as asked."""


class TraceFileError(RawpagedError):
    """A profile has ended but its trace could not be written; the text names file and reason."""


class RecordingError(RawpagedError):
    """A recording of ops is too large, no recording, or not consistent; the text says where."""


def count_of(number: int, noun: str) -> str:
    """As in "1 request" and "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
