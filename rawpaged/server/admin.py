"""What the routes behind --enable-admin-routes have in common that take no body."""

from __future__ import annotations

from aiohttp import web

from rawpaged.errors import InvalidRequestError
from rawpaged.server.body import read_body
from rawpaged.server.context import CONTEXT, ServerContext


async def admitted(request: web.Request, names: tuple[str, ...]) -> ServerContext:
    """What is shared, for an admin's request with no body and no query but `names`.

    Raises HttpError 404, InvalidRequestError.
    """
    context = request.app[CONTEXT]
    context.require_admin()
    for name in request.query:
        if name not in names:
            known = f"the query may have {', '.join(names)}" if names else "no query is taken"
            raise InvalidRequestError(f"{name[:50]!r} is not known; {known}", name[:50])
    if await read_body(request):
        known = f"; say ?{names[0]}=..." if names else ""
        raise InvalidRequestError(f"no body is taken{known}")
    return context
