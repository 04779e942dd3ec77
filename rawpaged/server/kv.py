"""GET /kv: the map of the KV pool, for whoever may see the ids of all requests."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from rawpaged.errors import InvalidRequestError
from rawpaged.server.context import CONTEXT

DEFAULT_BLOCKS = 4096
MAX_BLOCKS = 16_384
"""Of one answer; in the worst case, where no two neighbours are alike, it has 2 MB."""


async def show_kv(request: web.Request) -> web.Response:
    """Blocks [first_block, first_block + num_blocks) of the pool, as they are between two steps."""
    context = request.app[CONTEXT]
    context.require_admin()
    for name in request.query:
        if name not in ("first_block", "num_blocks"):
            raise InvalidRequestError(
                f"{name[:50]!r} is not known; the query may have first_block and num_blocks",
                name[:50],
            )
    num_blocks = _number(request, "num_blocks", DEFAULT_BLOCKS)
    if num_blocks > MAX_BLOCKS:
        message = f"num_blocks={num_blocks} must be at most {MAX_BLOCKS}; ask for several parts"
        raise InvalidRequestError(message, "num_blocks")
    block_map = await context.engine.block_map(_number(request, "first_block", 0), num_blocks)
    body = await asyncio.to_thread(msgspec.json.encode, block_map)
    return web.Response(
        body=body, content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _number(request: web.Request, name: str, default: int) -> int:
    """A number of the query, 0 or more, that is there once at most."""
    values = request.query.getall(name, [])
    if not values:
        return default
    text = values[0]
    # int() takes much that is no number to others: blanks, signs, underscores, other digits.
    if len(values) > 1 or not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise InvalidRequestError(f"{name} must be one number, not {text[:50]!r}", name)
    return int(text)
