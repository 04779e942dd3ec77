"""What surrounds every handler: request ids, the access log, errors as JSON, the API key."""

from __future__ import annotations

import hmac
import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from rawpaged.server.context import CONTEXT
from rawpaged.server.errors import HttpError, to_http_error
from rawpaged.server.labels import current_labels, start_labels

access_logger = logging.getLogger("rawpaged.server.access")

SERVER_NAME = "rawpaged"
OPEN_PATHS = ("/health", "/metrics")
PROBE_PATHS = (*OPEN_PATHS, "/kv")
CLIENT_CLOSED_REQUEST = 499


@web.middleware
async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line for each request when it has ended; 499 when the client went away first.

    Probes come every few seconds: while they get what they ask for they are logged at DEBUG.
    """
    labels = start_labels(request.headers.get("X-Request-Id", ""))
    started = time.monotonic()
    status = CLIENT_CLOSED_REQUEST
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        # The raw path is percent-encoded, so a client cannot forge log lines with it.
        is_probe = request.path in PROBE_PATHS and status == 200
        access_logger.log(
            logging.DEBUG if is_probe else logging.INFO,
            "%s %s %d %.3f s id=%s%s",
            request.method,
            request.rel_url.raw_path,
            status,
            time.monotonic() - started,
            labels.request_id,
            "" if labels.user is None else f" user={labels.user!r}",
        )


@web.middleware
async def report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception becomes an OpenAI error object, but for a connection that broke."""
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[CONTEXT].max_body_bytes
        return HttpError(413, f"the body is larger than {limit} bytes").response()
    except web.HTTPNotFound:
        return HttpError(404, f"there is no route {_describe(request)}").response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return HttpError(
            405,
            f"there is no route {_describe(request)}; the path takes {allowed}",
            headers={"Allow": error.headers["Allow"]},
        ).response()
    except Exception as error:
        return to_http_error(error).response()


def _describe(request: web.Request) -> str:
    return f"{request.method[:20]} {request.rel_url.raw_path[:200]}"


@web.middleware
async def check_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """With an API key set, only health, metrics and the page's files are open without it."""
    context = request.app[CONTEXT]
    api_key = context.api_key
    if api_key is not None and request.path not in (*OPEN_PATHS, *context.page_paths):
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Header bytes that are not UTF-8 come as surrogates.
        sent = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, api_key.encode()):
            raise HttpError(
                401,
                "missing or wrong API key: send the header `Authorization: Bearer <key>`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: name request and server in the response's headers, streams included.

    No versions: whoever looks for known holes should not be handed them.
    """
    response.headers["Server"] = SERVER_NAME
    # aiohttp refuses an unknown `Expect` header before any middleware has run.
    labels = current_labels.get(None)
    if labels is not None:
        response.headers["X-Request-Id"] = labels.request_id
