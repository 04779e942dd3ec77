"""The engine for asyncio programs and for the server."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rawpaged.config import EngineConfig
from rawpaged.engine.block_map import BlockMap, make_block_map
from rawpaged.engine.loading import load_engine
from rawpaged.engine.output_stream import LoopMailbox, OutputStream
from rawpaged.engine.profiling import Profile, ProfileOptions
from rawpaged.engine.stats import StatsLogger
from rawpaged.errors import ConfigError, InvalidRequestError
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.kv_stats import KVStats

MAX_STREAM_DELAY = 1.0
"""Seconds."""


class AsyncEngine:
    """One model on one engine thread; any number of event loops and threads may call it.

    Loading happens in the constructor. `close()`, or leaving the context manager, ends all
    requests and the thread and frees the memory.

    While steps take less than half of `stream_delay` seconds, outputs may come up to so much
    later, several at once; only the first and the last of a request come as soon as they are
    there. That saves processor time, which the kernels of a CPU have then.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        stats_logger: StatsLogger | None = None,
        stream_delay: float = 0.0,
    ) -> None:
        if not 0.0 <= stream_delay <= MAX_STREAM_DELAY:
            raise ConfigError(
                f"stream_delay={stream_delay} must be from 0 to {MAX_STREAM_DELAY} seconds"
            )
        loaded = load_engine(config, stats_logger)
        self.config = config
        self.model_config = loaded.model_config
        self.tokenizer = loaded.tokenizer
        self.memory_plan = loaded.plan
        self.max_model_len = loaded.plan.max_model_len
        self._admission = loaded.admission
        self._thread = loaded.thread
        self._numbers = itertools.count()
        self._stream_delay = stream_delay
        self._mailboxes: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}
        self._thread.set_on_delivered(self._flush)

    @property
    def is_running(self) -> bool:
        """False once closed or after the engine thread died."""
        return self._thread.is_running

    @property
    def num_queued(self) -> int:
        """Requests of which nothing has been computed yet."""
        return self._thread.num_queued

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
    ) -> OutputStream:
        """Outputs as they come, by `sampling_params.output_kind`; the last has `finished`.

        The request is queued by this call, not by the first iteration. Leaving the iterator
        early (`aclose`) aborts it. Raises InvalidRequestError before anything is queued and
        EngineClosedError. Iterating raises RequestFailedError if the engine fails, and
        InvalidRequestError if an unfinished request has the same `request_id`.
        """
        token_ids = self.validate(prompt, sampling_params)
        if request_id is None:
            request_id = f"request-{next(self._numbers)}-{secrets.token_hex(8)}"
        stream = OutputStream(self._thread, self._mailbox())
        text = prompt if isinstance(prompt, str) else None
        stream.submit(request_id, text, token_ids, sampling_params)
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort"."""
        self._thread.abort(request_id)

    async def start_profile(
        self,
        path: Path | None = None,
        *,
        record_path: Path | None = None,
        first_step: int | None = None,
        num_steps: int | None = None,
    ) -> int:
        """Trace steps from `first_step` (default: the next) on, which is returned.

        The profile ends after `num_steps` or by `stop_profile`; then its Chrome trace is written
        to `path`, and the calls of its ops to `record_path`. Raises ProfileError if one is running
        already, EngineClosedError.
        """
        options = ProfileOptions(
            path=path, record_path=record_path, first_step=first_step, num_steps=num_steps
        )
        return await asyncio.wrap_future(self._thread.start_profile(options))

    async def stop_profile(self) -> Profile:
        """End the profile, or tell of the one that has ended by itself.

        Raises ProfileError if there is none, TraceFileError if its file could not be written, and
        EngineClosedError.
        """
        return await asyncio.wrap_future(self._thread.stop_profile())

    async def kv_stats(self) -> KVStats:
        """The KV pool in numbers, when the step that runs is over. Raises EngineClosedError."""
        return await asyncio.wrap_future(self._thread.kv_stats())

    async def reset_prefix_cache(self) -> int:
        """Let no later request find KV that was computed before; requests that run go on.

        Returns the number of blocks that were to be found. Raises EngineClosedError.
        """
        return await asyncio.wrap_future(self._thread.reset_prefix_cache())

    async def block_map(self, first_block: int, num_blocks: int) -> BlockMap:
        """Part of the KV pool, block by block, when the step that runs is over.

        The engine's thread copies block tables only; the map is made in another. Raises
        InvalidRequestError for blocks that are not there, and EngineClosedError.
        """
        last = self.memory_plan.num_blocks - 1
        if not 0 <= first_block <= last:
            message = f"first_block={first_block} must be from 0 to {last}"
            raise InvalidRequestError(message, "first_block")
        if num_blocks < 1:
            raise InvalidRequestError(f"num_blocks={num_blocks} must be at least 1", "num_blocks")
        step, snapshot = await asyncio.wrap_future(self._thread.pool_snapshot())
        return await asyncio.to_thread(
            make_block_map, snapshot, step=step, first_block=first_block, num_blocks=num_blocks
        )

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until `wake_up`."""
        return self._thread.is_sleeping

    async def sleep(self, level: int = 1) -> None:
        """Give memory back to the system or the device until `wake_up`.

        Both levels give back the KV pool, with it the prefix cache, and the activations' buffers.
        Level 1 keeps the weights in host memory, where a CPU has them anyway; level 2 drops them.
        Asleep already, it only goes deeper. Raises SleepError while there are requests, and
        EngineClosedError.
        """
        await asyncio.wrap_future(self._thread.sleep(level))

    async def wake_up(self) -> None:
        """Take the memory again, and answer as before; after level 2 the checkpoint is read again.

        Raises BackendError or CheckpointError if it cannot be had; then the engine sleeps on.
        """
        await asyncio.wrap_future(self._thread.wake_up())

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

    def _mailbox(self) -> LoopMailbox:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = LoopMailbox(loop, self._stream_delay)
            running = {each: box for each, box in self._mailboxes.items() if not each.is_closed()}
            self._mailboxes = running | {loop: mailbox}
        return mailbox

    def _flush(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.flush()
