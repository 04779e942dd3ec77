"""Reading a request's body within its limit, and writing JSON."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rawpaged.server.context import CONTEXT
from rawpaged.server.errors import HttpError


async def read_body(request: web.Request) -> bytes:
    """The whole body, whatever its content type.

    Raises HttpError 415 for a compressed one, which could unfold to any size, and
    HTTPRequestEntityTooLarge.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise HttpError(415, f"bodies with content encoding {encoding[:50]!r} are not accepted")
    limit = request.app[CONTEXT].max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length)
    return await request.read()


def json_response(body: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
