"""POST /sleep and /wake_up, GET /is_sleeping: memory lent out while nobody needs the model."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rawpaged.errors import BackendError, CheckpointError, InvalidRequestError
from rawpaged.server.body import json_response, read_body
from rawpaged.server.context import CONTEXT, ServerContext
from rawpaged.server.errors import HttpError

_LEVELS = {"1": 1, "2": 2}


class SleepState(msgspec.Struct):
    is_sleeping: bool


async def sleep(request: web.Request) -> web.Response:
    """Give memory back (`AsyncEngine.sleep`); 409 while there are requests."""
    context = await _admitted(request, ("level",))
    given = request.query.getall("level", ["1"])
    if len(given) > 1 or given[0] not in _LEVELS:
        raise InvalidRequestError(f"level must be 1 or 2, not {','.join(given)[:50]!r}", "level")
    await context.engine.sleep(_LEVELS[given[0]])
    return _state(context)


async def wake_up(request: web.Request) -> web.Response:
    """Take the memory again; the answer comes when the engine is ready."""
    context = await _admitted(request, ())
    try:
        await context.engine.wake_up()
    except (BackendError, CheckpointError) as error:
        raise HttpError(500, str(error), code="wake_up_failed") from error
    return _state(context)


async def show_is_sleeping(request: web.Request) -> web.Response:
    return _state(await _admitted(request, ()))


async def _admitted(request: web.Request, names: tuple[str, ...]) -> ServerContext:
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
        raise InvalidRequestError("no body is taken; the level of a sleep is ?level=1 or ?level=2")
    return context


def _state(context: ServerContext) -> web.Response:
    return json_response(SleepState(context.engine.is_sleeping))
