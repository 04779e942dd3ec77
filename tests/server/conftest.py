"""A server on a real port of localhost, in a thread of its own, around a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

from rawpaged.server.app import create_app
from rawpaged.server.metrics import PrometheusStats
from rawpaged.server.run import serve_forever
from tests.server.fake_engine import FakeEngine


@dataclass
class Server:
    url: str
    engine: FakeEngine
    stats: PrometheusStats
    stop: Callable[[], None]
    """Begin the orderly end, as the first signal does."""
    hurry: Callable[[], None]


@contextmanager
def serve(
    engine: FakeEngine | None = None,
    *,
    port: int = 0,
    shutdown_timeout: float = 0.0,
    **options: Any,
) -> Iterator[Server]:
    """A running server; leaving shuts it down and fails if its thread raised or stays."""
    engine = engine or FakeEngine()
    stats = PrometheusStats("fake")
    ready = threading.Event()
    state: dict[str, Any] = {}

    async def main() -> None:
        app = create_app(
            cast(Any, engine), **{"served_model_names": ["fake"], "stats": stats, **options}
        )
        state.update(loop=asyncio.get_running_loop(), stop=asyncio.Event(), hurry=asyncio.Event())

        def on_ready(url: str) -> None:
            state["url"] = url
            ready.set()

        await serve_forever(
            app,
            host="127.0.0.1",
            port=port,
            on_ready=on_ready,
            stop=state["stop"],
            hurry=state["hurry"],
            shutdown_timeout=shutdown_timeout,
        )

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            state["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    if "url" not in state:
        raise state["error"]

    def signal(name: str) -> None:
        if thread.is_alive():
            state["loop"].call_soon_threadsafe(state[name].set)

    try:
        yield Server(state["url"], engine, stats, lambda: signal("stop"), lambda: signal("hurry"))
    finally:
        signal("stop")
        thread.join(20)
    assert not thread.is_alive()
    if "error" in state:
        raise state["error"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for tests that only ask and look at the answer."""
    with serve() as server:
        yield server
