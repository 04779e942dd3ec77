"""Reading a request's body within its limit, and writing JSON."""

from __future__ import annotations

import asyncio
import sys

import msgspec
from aiohttp import web

from rawpaged.server.context import CONTEXT
from rawpaged.server.errors import HttpError

# Not asyncio.wait_for: before Python 3.12 it forgets a cancellation that comes when the body is
# there already, and the requests of a client that has left would run to their ends.
if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

BODY_TIMEOUT_SECONDS = 60.0


async def read_body(request: web.Request) -> bytes:
    """The whole body, whatever its content type.

    Raises HTTPRequestEntityTooLarge, and HttpError: 415 for a compressed one, which could unfold
    to any size, 400 for a broken one, 408 for one that does not arrive within
    BODY_TIMEOUT_SECONDS.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"bodies with content encoding {encoding[:50]!r} are not accepted")
    limit = request.app[CONTEXT].max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length)
    try:
        async with timeout(BODY_TIMEOUT_SECONDS):
            return await request.read()
    except asyncio.TimeoutError:
        raise HttpError(408, f"the body took over {BODY_TIMEOUT_SECONDS:g} s to arrive") from None
    except web.RequestPayloadError as error:
        raise HttpError(400, f"the body is broken: {error}") from error


def json_response(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
