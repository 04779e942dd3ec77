"""The way of a request's outputs from the engine's thread to its reader on an event loop."""

from __future__ import annotations

import asyncio
import time
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

    def get_ready(self) -> RequestOutput | None:
        """Take the first if it is there and no error."""
        items = self._items
        if not items or isinstance(items[0], Exception):
            return None
        output = items.popleft()
        assert not isinstance(output, Exception)
        return output


class LoopMailbox:
    """Outputs for all readers on one event loop, which is woken at most once a step of the engine.

    To wake it is a system call, during which the loop's thread may take the interpreter's lock; if
    every request of a step did that, the engine would wait for HTTP in the middle of it. And what
    the loop does takes time from the kernels where these use all processors. So while steps take
    less than half of `delay` seconds the loop looks by itself, every `delay` seconds. It is woken
    all the same for what is urgent, and with it gets all else that is there.

    `put` and `flush` are for the engine's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, delay: float = 0.0) -> None:
        self._loop = loop
        self._delay = delay
        self._letters: deque[tuple[Outputs, RequestOutput | Exception]] = deque()
        # Of the engine's thread; the loop reads the last.
        self._has_news = self._is_urgent = False
        self._flushed_at = float("-inf")
        self._is_fast = False
        # Whether the loop is going to look: as it was woken, or by its timer.
        self._is_woken = self._is_timed = False

    def put(
        self, outputs: Outputs, output: RequestOutput | Exception, *, is_urgent: bool = False
    ) -> None:
        """To be sent by the next `flush`. Raises RuntimeError if the loop is closed."""
        if self._loop.is_closed():
            self._letters.clear()
            raise RuntimeError("the event loop is closed")
        self._letters.append((outputs, output))
        self._has_news = True
        self._is_urgent = self._is_urgent or is_urgent

    def flush(self) -> None:
        """Let the loop know of what was put in since the last call, if anything."""
        if not self._has_news:
            return
        is_urgent = self._is_urgent
        self._has_news = self._is_urgent = False
        now = time.monotonic()
        self._is_fast = now - self._flushed_at < self._delay / 2
        self._flushed_at = now
        # Whoever sees that the loop is going to look has put letters in that it will find.
        if not self._is_woken and (is_urgent or not self._is_timed):
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._on_wake)
            except RuntimeError:  # it was closed; the next `put` tells
                self._letters.clear()

    def _on_wake(self) -> None:
        self._is_woken = False
        self._distribute()

    def _on_timer(self) -> None:
        self._is_timed = False
        if self._letters:
            self._distribute()

    def _distribute(self) -> None:
        while self._letters:
            outputs, output = self._letters.popleft()
            outputs.put_nowait(output)
        if self._is_fast and not self._is_timed:
            self._is_timed = True
            self._loop.call_later(self._delay, self._on_timer)


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

        has_begun = False

        def sink(output: RequestOutput | Exception) -> None:
            nonlocal has_begun
            is_urgent = not has_begun or isinstance(output, Exception) or output.finished
            has_begun = True
            try:
                mailbox.put(outputs, output, is_urgent=is_urgent)
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

    def take_ready(self) -> list[RequestOutput]:
        """The outputs that are there already, up to the last one or an error."""
        ready = []
        while self._submission is not None:
            output = self._outputs.get_ready()
            if output is None:
                break
            ready.append(output)
            if output.finished:
                self._submission = None
        return ready

    async def aclose(self) -> None:
        """Abort the request unless it has ended; nothing more comes."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        submission, self._submission = self._submission, None
        if submission is not None:
            self._thread.cancel(submission)
