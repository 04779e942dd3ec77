"""Listening, signals and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from aiohttp import web

from rawpaged.engine.async_engine import AsyncEngine
from rawpaged.errors import ConfigError, EngineClosedError, count_of
from rawpaged.server.connection import Connection
from rawpaged.server.context import CONTEXT

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Benchmarks open a thousand connections at once."""
ABORT_GRACE_SECONDS = 3.0
"""For writing the last output of aborted requests to their clients."""
FLUSH_GRACE_SECONDS = 1.0
"""For what is written to leave this process."""
ENGINE_POLL_SECONDS = 1.0
"""Between two looks at whether the engine still lives."""


def run_server(
    app: web.Application,
    *,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    shutdown_timeout: float = 30.0,
) -> None:
    """Serve until SIGINT or SIGTERM, then end in order and return.

    `on_ready` gets the base URL, with the real port when `port` is 0, once connections are
    accepted. From the first signal on new work is refused and what runs may go on for
    `shutdown_timeout` seconds or until a second signal; then it is aborted. To be called from the
    main thread; signal handlers are those of before when this returns. Raises ConfigError when the
    address cannot be used, and EngineClosedError when the engine has died: then whoever supervises
    this process can start it again.
    """
    handled = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.getsignal(number) for number in handled}
    try:
        asyncio.run(_run_with_signals(app, host, port, on_ready, shutdown_timeout, handled))
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


async def serve_forever(
    app: web.Application,
    *,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    stop: asyncio.Event,
    hurry: asyncio.Event,
    shutdown_timeout: float,
) -> None:
    """`run_server` without signals: `stop` stands for the first one, `hurry` for the second.

    Returns also when the engine has died.
    """
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    watch = asyncio.create_task(_stop_with_engine(app[CONTEXT].engine, stop))
    try:
        listener = await _listen(runner, host, port)
        try:
            on_ready(_base_url(listener))
            await stop.wait()
            await _drain(app, hurry, shutdown_timeout)
        finally:
            listener.close()
    finally:
        watch.cancel()
        await _close(runner)


async def _stop_with_engine(engine: AsyncEngine, stop: asyncio.Event) -> None:
    while engine.is_running:
        await asyncio.sleep(ENGINE_POLL_SECONDS)
    stop.set()


async def _listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    """Accept connections for the runner's application; raises ConfigError.

    Not a TCPSite of aiohttp, since that makes connections of aiohttp's own class.
    """
    loop = asyncio.get_running_loop()
    server = runner.server
    assert server is not None

    def connect() -> Connection:
        # Bodies with a content encoding are refused, so nothing needs unpacking.
        return Connection(
            server,
            loop=loop,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # None turns it off
        )

    try:
        return await loop.create_server(connect, host, port, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason or error}") from error


async def _run_with_signals(
    app: web.Application,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    shutdown_timeout: float,
    handled: tuple[signal.Signals, ...],
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        else:
            logger.info("told to stop")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in handled:
        loop.add_signal_handler(number, on_signal)
    await serve_forever(
        app,
        host=host,
        port=port,
        on_ready=on_ready,
        stop=stop,
        hurry=hurry,
        shutdown_timeout=shutdown_timeout,
    )
    if not app[CONTEXT].engine.is_running:
        raise EngineClosedError("the engine has died, and the server ends with it; see the log")


async def _drain(app: web.Application, hurry: asyncio.Event, timeout: float) -> None:
    """Let requests end for `timeout` seconds or until `hurry`, then abort what is left.

    The socket stays open meanwhile: new work is told that the server goes away.
    """
    admission = app[CONTEXT].admission
    admission.start_draining()
    if admission.num_jobs:
        running = count_of(admission.num_jobs, "request")
        logger.info("shutting down: %s may run %g s more", running, timeout)
    await _wait_for_any([admission.idle, hurry], timeout)
    if admission.num_jobs:
        running = count_of(admission.num_jobs, "request")
        logger.warning("shutting down: aborting %s", running)
        await admission.abort_all()
        await _wait_for_any([admission.idle], ABORT_GRACE_SECONDS)


async def _wait_for_any(events: list[asyncio.Event], timeout: float) -> None:
    """Until one event is set or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _close(runner: web.AppRunner) -> None:
    """Stop listening and close every connection, also one whose client does not read."""
    connections = runner.server.connections if runner.server is not None else []
    transports = [c.transport for c in connections if isinstance(c.transport, asyncio.Transport)]
    await runner.cleanup()
    for _ in range(20):
        if not any(transport.get_write_buffer_size() for transport in transports):
            break
        await asyncio.sleep(FLUSH_GRACE_SECONDS / 20)
    for transport in transports:
        transport.abort()
    # A transport closes its socket in the next turn of the loop.
    await asyncio.sleep(0)


def _base_url(listener: asyncio.Server) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
