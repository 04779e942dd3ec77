"""The aiohttp application: one engine behind the OpenAI API's routes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from rawpaged.errors import ConfigError
from rawpaged.server.admission import Admission
from rawpaged.server.chat import create_chat_completion
from rawpaged.server.completions import create_completion
from rawpaged.server.context import CONTEXT, ServerContext
from rawpaged.server.info import (
    list_models,
    show_health,
    show_metrics,
    show_model,
    show_version,
)
from rawpaged.server.kv import show_kv
from rawpaged.server.metrics import PrometheusStats
from rawpaged.server.middleware import add_headers, check_api_key, log_access, report_errors
from rawpaged.server.page import page_routes
from rawpaged.server.prefix_cache import reset_prefix_cache
from rawpaged.server.profiling import start_profile, stop_profile
from rawpaged.server.sleep import show_is_sleeping, sleep, wake_up
from rawpaged.server.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from rawpaged.engine.async_engine import AsyncEngine

MAX_BODY_BYTES = 8 * 2**20


def create_app(
    engine: AsyncEngine,
    *,
    served_model_names: Sequence[str],
    stats: PrometheusStats,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    profiler_dir: Path | None = None,
    enable_admin_routes: bool = False,
    max_num_queued_reqs: int | None = None,
) -> web.Application:
    """An application that serves `engine` under every one of the names.

    `stats` is the engine's logger, shown at /metrics. With a `profiler_dir`, which has to be
    there, clients may start and stop profiles; with `enable_admin_routes` they may use those that
    `ServerContext.require_admin` guards. With `max_num_queued_reqs` prompts waiting, more of them
    are refused. The engine stays the caller's to close. Run the
    application with `run_server`, or with a runner made with `handler_cancellation=True`, without
    which requests of clients that went away run to their end. Raises ConfigError.
    """
    if not served_model_names or not all(served_model_names):
        raise ConfigError("a served model needs a name")
    if api_key is not None and not (api_key and api_key.isascii() and api_key.strip() == api_key):
        raise ConfigError("the API key must be ASCII, not empty and without blanks around it")
    app = web.Application(
        middlewares=[log_access, report_errors, check_api_key], client_max_size=max_body_bytes
    )
    page = page_routes()
    app[CONTEXT] = ServerContext(
        engine=engine,
        admission=Admission(engine, max_num_queued_reqs),
        served_model_names=tuple(served_model_names),
        stats=stats,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        profiler_dir=profiler_dir,
        enable_admin_routes=enable_admin_routes,
        page_paths=tuple(route.path for route in page),
        created=int(time.time()),
    )
    app.on_response_prepare.append(add_headers)
    app.add_routes([*_routes(), *page])
    return app


def _routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/completions", create_completion),
        web.post("/v1/chat/completions", create_chat_completion),
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.get("/v1/models", list_models),
        # Names such as `org/model` hold slashes.
        web.get("/v1/models/{name:.+}", show_model),
        web.get("/health", show_health),
        web.get("/version", show_version),
        web.get("/metrics", show_metrics),
        web.get("/kv", show_kv),
        web.post("/reset_prefix_cache", reset_prefix_cache),
        web.post("/sleep", sleep),
        web.post("/wake_up", wake_up),
        web.get("/is_sleeping", show_is_sleeping),
        web.post("/start_profile", start_profile),
        web.post("/stop_profile", stop_profile),
    ]
