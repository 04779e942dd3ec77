"""Chooses each sampling request's next token from its logits, by its own parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rawpaged.backend import (
    Backend,
    DrawnTokens,
    LogitEdits,
    RunAhead,
    SamplingRows,
    TokenLogprobRows,
)
from rawpaged.engine.beam_search import beam_rules
from rawpaged.request import Request

NO_TOKEN = -1
"""Sampled where no logit is above -inf: the model's numbers are broken."""

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: the token that stands there, then the likeliest."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class SampledToken(NamedTuple):
    token_id: int
    logprobs: PositionLogprobs | None


class LogitsCopy:
    """A copy of logits, in memory that is allocated by the first and serves all of `max_rows`."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._copy: Any = None  # f32[max_rows, vocab_size]
        self._rows: Any = None  # i32[max_rows]: 0, 1, 2, ...

    def of(self, backend: Backend, logits: Any) -> Any:
        """Valid until the next."""
        num_rows, vocab_size = logits.shape
        if self._copy is None:
            self._rows = backend.upload(np.arange(self._max_rows, dtype=np.int32))
            self._copy = backend.empty((self._max_rows, vocab_size), "float32")
        copy = self._copy[:num_rows]
        backend.gather_rows(copy, logits, self._rows[:num_rows])
        return copy


class Sampling:
    """Tokens that are being sampled, or have been."""

    def __init__(self, drawn: Callable[[], DrawnTokens], wanted: Sequence[int | None]) -> None:
        self._drawn = drawn
        self._wanted = wanted
        """By row: likeliest tokens to list; None: no log-probabilities."""

    def wait(self) -> list[SampledToken]:
        """One token a row; until the next sampling."""
        drawn = self._drawn()
        token_ids, table = drawn.token_ids.tolist(), drawn.logprobs
        if table is None:
            return [SampledToken(token_id, None) for token_id in token_ids]
        return [
            SampledToken(
                token_id, None if k is None else position_logprobs(table, row, token_id, k)
            )
            for row, (token_id, k) in enumerate(zip(token_ids, self._wanted, strict=True))
        ]


class Sampler:
    """Samples from the logits of up to `max_rows` rows at a time.

    What the same requests sample by, but for their positions, is put together once.
    """

    def __init__(self, max_rows: int) -> None:
        self._copy = LogitsCopy(max_rows)
        self._requests: list[Request] = []
        self._rows = _sampling_rows(self._requests)
        self._wanted: list[int | None] = []
        self._most: int | None = None
        self._may_edit = False

    def launch(
        self,
        backend: Backend,
        logits: Any,
        requests: Sequence[Request],
        ahead: RunAhead | None = None,
    ) -> Sampling:
        """Sample one token a request; logits f32[len(requests), vocab_size] may be changed.

        Reported log-probabilities are those before bias, penalties and temperature. The tokens are
        there when it returns, unless it is to run ahead.
        """
        rows = self._rows_of(requests)
        edits = _logit_edits(requests) if self._may_edit else None
        most, edited = self._most, logits
        if edits is not None:
            if most is not None:
                edited = self._copy.of(backend, logits)
            backend.edit_logits(edited, edits)
        if ahead is not None:
            drawn = ahead.sample(edited, rows, reported=logits, num_logprobs=most)
            return Sampling(drawn, self._wanted)
        token_ids = backend.sample(edited, rows)
        table = None
        if most is not None:
            table = backend.token_logprobs(logits, np.maximum(token_ids, 0), most)
        tokens = DrawnTokens(token_ids, table)
        return Sampling(lambda: tokens, self._wanted)

    def _rows_of(self, requests: Sequence[Request]) -> SamplingRows:
        """The same object for the same requests."""
        if self._requests != requests:
            self._requests = list(requests)
            self._rows = _sampling_rows(requests)
            self._wanted = [_num_logprobs(request) for request in requests]
            self._most = max((k for k in self._wanted if k is not None), default=None)
            self._may_edit = any(map(_may_edit, requests))
        positions = self._rows.positions.data
        for row, request in enumerate(requests):
            positions[row] = request.num_tokens
        return self._rows


def _num_logprobs(request: Request) -> int | None:
    """Likeliest tokens to list: those to be reported, and what a beam chooses from."""
    params = request.sampling_params
    reported = params.logprobs
    if not params.use_beam_search:
        # Of samples that are compared, at least the drawn token's.
        return 0 if reported is None and params.num_samples > params.n else reported
    return max(reported or 0, beam_rules(request).num_candidates)


def position_logprobs(
    table: TokenLogprobRows, row: int, token_id: int, k: int
) -> PositionLogprobs:
    """Row `row` of the table, cut to the k likeliest tokens."""
    return PositionLogprobs(
        token_ids=(token_id, *table.top_token_ids[row, :k].tolist()),
        logprobs=(float(table.chosen[row]), *table.top_logprobs[row, :k].tolist()),
        ranks=(int(table.ranks[row]), *range(1, k + 1)),
    )


def _sampling_rows(requests: Sequence[Request]) -> SamplingRows:
    """Positions are not in yet."""
    params = [request.sampling_params for request in requests]
    return SamplingRows(
        # Of a beam only the candidates count; its token says no more than that there are some.
        temperature=np.array(
            [0.0 if p.use_beam_search else p.temperature for p in params], np.float32
        ),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seeds=np.array([request.seed & _SEED_MASK for request in requests], np.uint64),
        positions=np.zeros(len(requests), np.uint32),
        # A prompt's samples have seeds of their own.
        sample_indices=np.zeros(len(requests), np.uint32),
    )


def _may_edit(request: Request) -> bool:
    """Whether `_row_entries` may have any for it at some time."""
    params = request.sampling_params
    return not params.use_beam_search and bool(
        params.logit_bias or params.min_tokens > 0 or params.has_penalties
    )


@dataclass(slots=True)
class _Entry:
    """What happens to one token's logit in one row."""

    bias: float = 0.0
    seen: bool = False
    count: int = 0


def _logit_edits(requests: Sequence[Request]) -> LogitEdits | None:
    """The sparse changes of all rows, or None when there are none."""
    entries = {
        (row, token_id): entry
        for row, request in enumerate(requests)
        for token_id, entry in _row_entries(request).items()
    }
    if not entries:
        return None
    params = [request.sampling_params for request in requests]
    return LogitEdits(
        rows=np.array([row for row, _ in entries], np.int32),
        token_ids=np.array([token_id for _, token_id in entries], np.int32),
        bias=np.array([entry.bias for entry in entries.values()], np.float32),
        seen=np.array([entry.seen for entry in entries.values()], np.bool_),
        counts=np.array([entry.count for entry in entries.values()], np.int32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
        frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
        presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
    )


def _row_entries(request: Request) -> dict[int, _Entry]:
    """Entries of one request by token id: bias, forbidden stops, penalties.

    A beam search passes over forbidden stops by itself, and takes no bias or penalties.
    """
    params = request.sampling_params
    entries: dict[int, _Entry] = {}
    if params.use_beam_search:
        return entries
    for token_id, bias in (params.logit_bias or {}).items():
        entries.setdefault(token_id, _Entry()).bias += bias
    if request.num_output_tokens < params.min_tokens:
        for token_id in {*request.eos_token_ids, *(params.stop_token_ids or ())}:
            entries.setdefault(token_id, _Entry()).bias = -np.inf
    if params.has_penalties:
        if params.repetition_penalty != 1.0:
            for token_id in set(request.token_ids):
                entries.setdefault(token_id, _Entry()).seen = True
        for token_id, count in Counter(request.output_token_ids).items():
            entries.setdefault(token_id, _Entry()).count = count
    return entries
