"""The way of a request's outputs from the engine's thread to its reader on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rawpaged.engine.engine_thread import EngineThread
from rawpaged.engine.output_processor import Submission
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import SamplingParams


class Outputs:
    """A queue between two callbacks of one event loop, one of which is the only reader.

    It does for one what asyncio.Queue does for many, in a third of the calls.
    """

    def __init__(self) -> None:
        self._items: deque[RequestOutput | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: RequestOutput | Exception) -> None:
        """Add at the end, and wake the reader."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> RequestOutput | Exception:
        """Take the first, when there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class LoopMailbox:
    """Outputs for all readers on one event loop, which is woken once for as many as there are.

    To wake it is a system call, during which the loop's thread may take the interpreter's lock; if
    every request of a step did that, the engine would wait for HTTP in the middle of it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Outputs, RequestOutput | Exception]] = deque()
        self._is_woken = False

    def put(self, outputs: Outputs, output: RequestOutput | Exception) -> None:
        """Called by any thread but the loop's. Raises RuntimeError if the loop is closed."""
        # In this order: whoever sees that it is woken has put a letter in that will be found.
        self._letters.append((outputs, output))
        # A loop that was closed after it was woken has to be found out, too.
        if not self._is_woken or self._loop.is_closed():
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._distribute)
            except RuntimeError:
                self._is_woken = False
                self._letters.clear()
                raise

    def _distribute(self) -> None:
        self._is_woken = False
        while self._letters:
            outputs, output = self._letters.popleft()
            outputs.put_nowait(output)


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader on the event loop that asked for it.

    A reader that leaves early (`aclose`, cancellation, or letting go of the stream) aborts the
    request, whether it has begun to read or not.
    """

    def __init__(self, thread: EngineThread, mailbox: LoopMailbox) -> None:
        self._submission: Submission | None = None
        """None once the request has ended for the reader."""
        self._thread = thread
        self._mailbox = mailbox
        self._outputs = Outputs()

    def submit(
        self, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams
    ) -> None:
        """Queue the request; raises EngineClosedError."""
        mailbox, outputs, cancel = self._mailbox, self._outputs, self._thread.cancel

        def sink(output: RequestOutput | Exception) -> None:
            try:
                mailbox.put(outputs, output)
            except RuntimeError:  # the loop was closed: nobody is left to read
                cancel(submission)

        submission = Submission(request_id, prompt, token_ids, params, sink)
        self._thread.submit(submission)
        self._submission = submission

    async def __anext__(self) -> RequestOutput:
        if self._submission is None:
            raise StopAsyncIteration
        try:
            output = await self._outputs.get()
        except BaseException:
            self._leave()
            raise
        if isinstance(output, Exception):
            self._submission = None
            raise output
        if output.finished:
            self._submission = None
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has ended; nothing more comes."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        submission, self._submission = self._submission, None
        if submission is not None:
            self._thread.cancel(submission)
