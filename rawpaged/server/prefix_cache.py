"""POST /reset_prefix_cache: what was computed so far is found by no later request."""

from __future__ import annotations

import msgspec
from aiohttp import web

from rawpaged.server.admin import admitted
from rawpaged.server.body import json_response


class ResetPrefixCache(msgspec.Struct):
    num_blocks: int
    """Blocks that a prefix hit would have found."""


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all prefixes (`AsyncEngine.reset_prefix_cache`)."""
    context = await admitted(request, ())
    return json_response(ResetPrefixCache(await context.engine.reset_prefix_cache()))
