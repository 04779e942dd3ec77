"""Errors on the wire: the OpenAI error object, and which HTTP status each exception becomes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from aiohttp import web

from rawpaged.errors import (
    EngineClosedError,
    EngineSleepingError,
    InvalidRequestError,
    ProfileError,
    QueueFullError,
    RawpagedError,
    RequestFailedError,
    SleepError,
    TraceFileError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 5


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorInfo


class HttpError(RawpagedError):
    """An answer other than 2xx; `headers` are added to those of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorResponse:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return ErrorResponse(
            ErrorInfo(message=str(self), type=kind, param=self.param, code=self.code)
        )

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.body),
            content_type="application/json",
            headers=self.headers,
        )


def to_http_error(error: Exception) -> HttpError:
    """What a client is told about any exception; an unexpected one is logged, its text kept in."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, InvalidRequestError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, ProfileError):
        return HttpError(409, str(error), code="profile_conflict")
    if isinstance(error, (EngineClosedError, QueueFullError)):
        return HttpError(
            503,
            str(error),
            code="queue_full" if isinstance(error, QueueFullError) else "service_unavailable",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )
    if isinstance(error, EngineSleepingError):
        return HttpError(503, str(error), code="sleeping")
    if isinstance(error, SleepError):
        return HttpError(409, str(error), code="sleep_conflict")
    if isinstance(error, TraceFileError):
        return HttpError(500, str(error), code="trace_file")
    if isinstance(error, RequestFailedError):
        return HttpError(500, str(error), code="request_failed")
    if isinstance(error, web.HTTPException):
        return _from_http_exception(error)
    logger.error("unexpected error while answering a request", exc_info=error)
    return HttpError(500, "internal server error", code="internal_error")


def _from_http_exception(error: web.HTTPException) -> HttpError:
    """aiohttp's own refusals, but for those that the middleware words."""
    return HttpError(error.status, error.text or error.reason)
