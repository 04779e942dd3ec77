"""Who may start work, and which engine requests are under way: what a shutdown needs to know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from rawpaged.errors import (
    EngineClosedError,
    EngineSleepingError,
    InvalidRequestError,
    QueueFullError,
    count_of,
)
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rawpaged.engine.async_engine import AsyncEngine
    from rawpaged.engine.output_stream import OutputStream

_Item = tuple[int, list[RequestOutput] | Exception | None]
"""What came of a stream, by its index; None: its end."""


class Admission:
    """Counts HTTP requests that generate, and aborts the engine requests nobody waits for.

    Lives on one event loop. `idle` is set while no such HTTP request is under way.
    """

    def __init__(self, engine: AsyncEngine, max_num_queued_reqs: int | None = None) -> None:
        self._engine = engine
        self._max_num_queued_reqs = max_num_queued_reqs
        self._num_jobs = 0
        self._live_ids: set[str] = set()
        self._draining = False
        self._aborting = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def is_open(self) -> bool:
        """Whether the server lives and goes on living; it may be asleep."""
        return not self._draining and self._engine.is_running

    @property
    def num_jobs(self) -> int:
        return self._num_jobs

    @contextmanager
    def job(self) -> Iterator[None]:
        """Held by an HTTP request from its admission until its response is written.

        Raises EngineClosedError when the server is shutting down or the engine is gone, and
        EngineSleepingError while it sleeps.
        """
        self._check_open()
        self._num_jobs += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_jobs -= 1
            if self._num_jobs == 0:
                self.idle.set()

    def check_queue(self, num_requests: int) -> None:
        """Raises QueueFullError unless so many more engine requests may wait.

        And InvalidRequestError if so many never may.

        To be called right before they are generated, with nothing awaited between.
        """
        limit, num_queued = self._max_num_queued_reqs, self._engine.num_queued
        if limit is not None and num_requests > limit:
            raise InvalidRequestError(
                f"{num_requests} prompts are more than max_num_queued_reqs={limit}; send fewer",
                "prompt",
            )
        if limit is not None and num_queued + num_requests > limit:
            raise QueueFullError(
                f"{count_of(num_queued, 'prompt')} waiting already, and with {num_requests} more "
                f"that is more than max_num_queued_reqs={limit}; try again later"
            )

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Outputs of one engine request, queued now, which is aborted unless read to its end.

        As many at a time as have come, at least one.
        """
        stream = self._engine.generate(prompt_token_ids, params, request_id=request_id)
        return self._read(stream, request_id)

    async def _read(
        self, stream: OutputStream, request_id: str
    ) -> AsyncGenerator[list[RequestOutput], None]:
        finished = False
        self._live_ids.add(request_id)
        try:
            if self._aborting:
                raise EngineClosedError("the server is shutting down")
            async for output in stream:
                outputs = [output, *stream.take_ready()]
                finished = outputs[-1].finished
                yield outputs
        finally:
            self._live_ids.discard(request_id)
            if not finished:
                await self._engine.abort(request_id)

    def start_draining(self) -> None:
        """Refuse new work from now on."""
        self._draining = True

    async def abort_all(self) -> None:
        """End every engine request; their readers get a last output with reason "abort"."""
        self._draining = True
        self._aborting = True
        for request_id in list(self._live_ids):
            await self._engine.abort(request_id)

    def _check_open(self) -> None:
        if self._draining:
            raise EngineClosedError("the server is shutting down")
        if not self._engine.is_running:
            raise EngineClosedError("the engine is not running")
        if self._engine.is_sleeping:
            raise EngineSleepingError


async def merge(
    streams: list[AsyncGenerator[list[RequestOutput], None]],
) -> AsyncGenerator[tuple[int, list[RequestOutput]], None]:
    """What comes of all streams, as it comes, with the index of their stream.

    A slow reader holds the streams back. When it leaves, or one stream fails, all are closed
    before this returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for outputs in stream:
                yield 0, outputs
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=1)
    tasks = [
        asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)
    ]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[list[RequestOutput], None],
    queue: asyncio.Queue[_Item],
) -> None:
    """Move a stream into the queue; its end is None, its failure the exception."""
    try:
        async with aclosing(stream):
            async for outputs in stream:
                await queue.put((index, outputs))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))
