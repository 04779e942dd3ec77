"""GET /: the files of the live page, from memory, and what the page has to know first."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from importlib import resources

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rawpaged.server.body import json_response
from rawpaged.server.context import CONTEXT

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Nothing but this server's own files, no text that becomes code, and no frame around it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept, but asked for again each time: another version must not be mixed with this one.
    "Cache-Control": "no-cache",
}
PAGE_ROOT = "/page/"


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str
    etag: str


class ServerInfo(msgspec.Struct, kw_only=True):
    """What the page has to know before it asks for the map; told without a key."""

    model: str
    kv: bool
    """Whether /kv may be asked."""
    api_key: bool
    """Whether /kv needs a key."""
    started: float
    """Unix time; another one means another start."""


def page_routes() -> list[web.RouteDef]:
    """The page at /, its files, and page/server.json."""
    files = _read_files()
    started = time.time()

    async def show_server(request: web.Request) -> web.Response:
        context = request.app[CONTEXT]
        response = json_response(
            ServerInfo(
                model=context.served_model_names[0],
                kv=context.enable_admin_routes,
                api_key=context.api_key is not None,
                started=started,
            )
        )
        response.headers["Cache-Control"] = "no-store"
        return response

    routes = [web.get(PAGE_ROOT + "server.json", show_server)]
    for name, file in files.items():
        routes.append(web.get("/" if name == "index.html" else PAGE_ROOT + name, _handler(file)))
    return routes


def _read_files() -> dict[str, PageFile]:
    """Every file of the page by its name."""
    files = {}
    for path in (resources.files("rawpaged.server") / "page").iterdir():
        content_type = CONTENT_TYPES.get("." + path.name.rpartition(".")[2])
        if content_type is not None:
            content = path.read_bytes()
            etag = hashlib.sha256(content).hexdigest()[:32]
            files[path.name] = PageFile(content, content_type, etag)
    return files


def _handler(file: PageFile) -> Handler:
    async def show(request: web.Request) -> web.Response:
        known = request.if_none_match or ()
        if any(etag.value == file.etag for etag in known):
            response = web.Response(status=304)
        else:
            response = web.Response(body=file.content)
            response.headers["Content-Type"] = file.content_type
        response.etag = file.etag
        response.headers.update(HEADERS)
        return response

    return show
