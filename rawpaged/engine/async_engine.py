"""The engine for asyncio programs and for the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from rawpaged.config import EngineConfig
from rawpaged.engine.stats import StatsLogger
from rawpaged.models.config import ModelConfig
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import SamplingParams
from rawpaged.tokenization.tokenizer import Tokenizer


class AsyncEngine:
    """One model on one engine thread; any number of event loops and threads may call it.

    Loading happens in the constructor. `close()` ends all requests and the thread.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    max_model_len: int

    def __init__(self, config: EngineConfig, *, stats_logger: StatsLogger | None = None) -> None:
        raise NotImplementedError

    def validate(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Token ids of the prompt; raises InvalidRequestError for what `generate` would refuse."""
        raise NotImplementedError

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, by `sampling_params.output_kind`; the last has `finished`.

        Leaving the iterator early aborts the request. Raises InvalidRequestError before anything
        is queued, EngineClosedError, RequestFailedError.
        """
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish_reason "abort"."""
        raise NotImplementedError

    @property
    def is_running(self) -> bool:
        """False once closed or after the engine thread died."""
        raise NotImplementedError

    def close(self) -> None:
        """End all requests with finish_reason "abort", stop the thread, free all memory."""
        raise NotImplementedError

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
