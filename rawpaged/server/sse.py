"""Server-sent events: one JSON object each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from rawpaged.server.errors import to_http_error

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx buffers a proxied response unless told not to.
    "X-Accel-Buffering": "no",
}

# JSON allows these raw, but readers that split lines as Unicode does would break an event there.
_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def encode_event(event: msgspec.Struct) -> bytes:
    """The event's bytes; its JSON holds no line break of any kind."""
    data = msgspec.json.encode(event)
    for raw, escaped in _LINE_BREAKS:
        data = data.replace(raw, escaped)
    return b"data: %b\n\n" % data


async def respond_with_events(
    request: web.Request, events: AsyncGenerator[Sequence[msgspec.Struct], None]
) -> web.StreamResponse:
    """Write the events as they come, then `[DONE]`; a failure among them is the last event.

    Events that come together go out in one write.
    Waits while the client reads too slowly, so no more than the socket's buffer is kept here.
    `events` is closed in any case, also when the client goes away.
    """
    response = web.StreamResponse(headers=HEADERS)
    async with aclosing(events):
        await response.prepare(request)
        try:
            async for batch in events:
                if batch:
                    await response.write(b"".join(map(encode_event, batch)))
        except ConnectionError:
            raise
        except Exception as error:
            last = encode_event(to_http_error(error).body)
        else:
            last = b"data: [DONE]\n\n"
    await response.write_eof(last)
    return response
