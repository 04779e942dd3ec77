"""POST /sleep and /wake_up, GET /is_sleeping: memory lent out while nobody needs the model."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rawpaged.errors import BackendError, CheckpointError, InvalidRequestError
from rawpaged.server.admin import admitted
from rawpaged.server.body import json_response
from rawpaged.server.context import ServerContext
from rawpaged.server.errors import HttpError

_LEVELS = {"1": 1, "2": 2}


class SleepState(msgspec.Struct):
    is_sleeping: bool


async def sleep(request: web.Request) -> web.Response:
    """Give memory back (`AsyncEngine.sleep`); 409 while there are requests."""
    context = await admitted(request, ("level",))
    given = request.query.getall("level", ["1"])
    if len(given) > 1 or given[0] not in _LEVELS:
        raise InvalidRequestError(f"level must be 1 or 2, not {','.join(given)[:50]!r}", "level")
    await context.engine.sleep(_LEVELS[given[0]])
    return _state(context)


async def wake_up(request: web.Request) -> web.Response:
    """Take the memory again; the answer comes when the engine is ready."""
    context = await admitted(request, ())
    try:
        await context.engine.wake_up()
    except (BackendError, CheckpointError) as error:
        raise HttpError(500, str(error), code="wake_up_failed") from error
    return _state(context)


async def show_is_sleeping(request: web.Request) -> web.Response:
    return _state(await admitted(request, ()))


def _state(context: ServerContext) -> web.Response:
    return json_response(SleepState(context.engine.is_sleeping))
