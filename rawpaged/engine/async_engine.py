"""The engine for asyncio programs and for the server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from rawpaged.config import EngineConfig
from rawpaged.engine.engine_thread import EngineThread
from rawpaged.engine.loading import load_engine
from rawpaged.engine.output_processor import Sink, Submission
from rawpaged.engine.stats import StatsLogger
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import SamplingParams


class AsyncEngine:
    """One model on one engine thread; any number of event loops and threads may call it.

    Loading happens in the constructor. `close()`, or leaving the context manager, ends all
    requests and the thread and frees the memory.
    """

    def __init__(self, config: EngineConfig, *, stats_logger: StatsLogger | None = None) -> None:
        loaded = load_engine(config, stats_logger)
        self.config = config
        self.model_config = loaded.model_config
        self.tokenizer = loaded.tokenizer
        self.memory_plan = loaded.plan
        self.max_model_len = loaded.plan.max_model_len
        self._admission = loaded.admission
        self._thread = loaded.thread
        self._numbers = itertools.count()

    @property
    def is_running(self) -> bool:
        """False once closed or after the engine thread died."""
        return self._thread.is_running

    def validate(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Token ids of the prompt; raises InvalidRequestError for what `generate` would refuse."""
        token_ids = self._admission.prompt_token_ids(prompt)
        self._admission.check_params(params, len(token_ids))
        return token_ids

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, by `sampling_params.output_kind`; the last has `finished`.

        The request is queued by this call, not by the first iteration. Leaving the iterator
        early (`aclose`) aborts it. Raises InvalidRequestError before anything is queued and
        EngineClosedError; iterating raises RequestFailedError if the engine fails.
        """
        token_ids = self.validate(prompt, sampling_params)
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._thread.submit(
            Submission(
                request_id,
                prompt if isinstance(prompt, str) else None,
                token_ids,
                sampling_params,
                _sink_into(outputs, self._thread, request_id),
            )
        )
        return _stream(outputs, self._thread, request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort"."""
        self._thread.abort(request_id)

    def close(self) -> None:
        """End all requests with finish_reason "abort", stop the thread, free all memory."""
        self._thread.close()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _sink_into(
    outputs: asyncio.Queue[RequestOutput | Exception], thread: EngineThread, request_id: str
) -> Sink:
    """A sink for the engine's thread that hands outputs to the running event loop."""
    loop = asyncio.get_running_loop()

    def sink(output: RequestOutput | Exception) -> None:
        try:
            loop.call_soon_threadsafe(outputs.put_nowait, output)
        except RuntimeError:  # the loop was closed: nobody is left to read
            thread.abort(request_id)

    return sink


async def _stream(
    outputs: asyncio.Queue[RequestOutput | Exception], thread: EngineThread, request_id: str
) -> AsyncIterator[RequestOutput]:
    ended = False
    try:
        while not ended:
            output = await outputs.get()
            if isinstance(output, Exception):
                ended = True
                raise output
            ended = output.finished
            yield output
    finally:
        if not ended:
            thread.abort(request_id)
