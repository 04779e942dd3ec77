"""The routes that only tell: models, health, version, metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web

import rawpaged
from rawpaged.server import metrics
from rawpaged.server.body import json_response
from rawpaged.server.context import CONTEXT, ServerContext
from rawpaged.server.errors import RETRY_AFTER_SECONDS


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "rawpaged"
    root: str
    """What the engine loaded: a directory, a file or a hub id."""
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Health(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


async def list_models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    names = context.served_model_names
    return json_response(ModelList(data=[_model_card(context, name) for name in names]))


async def show_model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    name = context.check_model(request.match_info["name"])
    return json_response(_model_card(context, name))


async def show_health(request: web.Request) -> web.Response:
    """200 while the engine lives, asleep or not; 503 once it died or the server shuts down."""
    context = request.app[CONTEXT]
    if not context.admission.is_open:
        response = json_response(Health("unavailable"), status=503)
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return response
    # Who restarts servers that are not healthy must leave one alone that sleeps on purpose.
    return json_response(Health("sleeping" if context.engine.is_sleeping else "ok"))


async def show_version(request: web.Request) -> web.Response:
    return json_response(Version(rawpaged.__version__))


async def show_metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=request.app[CONTEXT].stats.render(), headers={"Content-Type": metrics.CONTENT_TYPE}
    )


def _model_card(context: ServerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=context.created,
        root=context.engine.config.model,
        max_model_len=context.engine.max_model_len,
    )
