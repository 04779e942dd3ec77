"""What the handlers of one application share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from rawpaged.errors import InvalidRequestError
from rawpaged.server.admission import Admission
from rawpaged.server.errors import HttpError
from rawpaged.server.metrics import PrometheusStats

if TYPE_CHECKING:
    from rawpaged.engine.async_engine import AsyncEngine
    from rawpaged.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """One engine and how it is offered."""

    engine: AsyncEngine
    admission: Admission
    served_model_names: tuple[str, ...]
    stats: PrometheusStats
    api_key: str | None
    max_body_bytes: int
    profiler_dir: Path | None
    """Where traces are written; None: the profiling routes are off."""
    enable_admin_routes: bool
    """Whether clients may use routes that look into the engine or change it for everybody."""
    page_paths: tuple[str, ...]
    """Paths of the live page and of its files, which a browser asks for without a key."""
    created: int
    """Unix time of the start, shown as the models' age."""

    def check_model(self, name: str | None) -> str:
        """The name to answer under: as asked for, or the first served one.

        Raises HttpError 404 for a model that is not served.
        """
        if name is None:
            return self.served_model_names[0]
        if name not in self.served_model_names:
            raise HttpError(
                404,
                f"the model {name[:200]!r} does not exist; this server has "
                f"{', '.join(map(repr, self.served_model_names))}",
                param="model",
                code="model_not_found",
            )
        return name

    def require_admin(self) -> None:
        """Raises HttpError 404 unless the server was started with --enable-admin-routes."""
        if not self.enable_admin_routes:
            raise HttpError(
                404, "admin routes are off: start the server with --enable-admin-routes"
            )

    def require_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer; without one the field `param` cannot be honoured."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer: it takes prompts of token ids only",
                param,
            )
        return tokenizer


CONTEXT = web.AppKey("context", ServerContext)
