"""One client's connection: what is no HTTP is answered and logged in a line, not a traceback.

Clients that leave in the middle are no error either; the access log has a line for them.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rawpaged.server.errors import HttpError
from rawpaged.server.middleware import SERVER_NAME

logger = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """aiohttp's connection, which else tells of broken HTTP at ERROR, and of its own version."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer where no handler gave one: bytes that are no HTTP, or a failure in aiohttp.

        Raises ConnectionError again, which aiohttp takes for a client that has left.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        response: web.StreamResponse
        if isinstance(exc, HttpProcessingError):
            # Only the first line: the others repeat what was sent, which may hold a key.
            lines = exc.message.splitlines() or ["unknown reason"]
            reason = lines[0].strip().rstrip(":")[:200]
            logger.info("refused malformed HTTP from %s: %s", request.remote, reason)
            response = HttpError(exc.code, f"malformed HTTP: {reason}").response()
            response.force_close()
        else:
            response = super().handle_error(request, status, exc, message)
        response.headers["Server"] = SERVER_NAME
        return response
