"""Beam search over candidates that a model gives: which beams go on, and when it is over.

No model and no block is known here. The rules are those of transformers 5
(`GenerationMixin._beam_search`): of all continuations of all beams, the `width` best that do not
end are the next beams; those that end count only if they are among the `width` best of all.
Beam search: Lowerre, The HARPY Speech Recognition System, 1976.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rawpaged.request import Request
from rawpaged.sampling_params import EarlyStopping


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of one beam, likeliest first, ties by lower id."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural logarithms, before any penalty."""


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What one search does; the meaning of the names is transformers'."""

    width: int
    max_tokens: int
    """Tokens after the prompt at most."""
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    """No stop token among the first so many tokens."""
    length_penalty: float = 1.0
    """A hypothesis of n tokens scores its log-probability / n ** length_penalty."""
    early_stopping: EarlyStopping = False
    """When the search ends once there are `width` hypotheses: True, at once; False, when the best
    beam, ended at its present length, would not be better than the worst of them; "never", when
    it could not become better at any length up to max_tokens."""

    @property
    def num_candidates(self) -> int:
        """Candidates of each beam that decide a step exactly.

        No beam has more than `width` of the best `width` continuations, or of the best `width`
        that do not end; and of any width + n candidates at most n are stop tokens.
        """
        return self.width + len(self.stop_token_ids)


def beam_rules(request: Request) -> BeamRules:
    """The search that a request's parameters ask for."""
    params = request.sampling_params
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else request.eos_token_ids)}
    return BeamRules(
        width=params.n,
        max_tokens=request.max_tokens,
        stop_token_ids=frozenset(stops),
        min_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of one or several beams, with the tokens before it."""

    token_id: int
    logprob: float
    rank: int
    before: _Token | None
    candidates: Candidates | None
    """The likeliest there, if they are kept."""


@dataclass(frozen=True, slots=True)
class _Beam:
    """A sequence that goes on."""

    last: _Token | None
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """One position of a hypothesis."""

    token_id: int
    logprob: float
    rank: int
    """1 + the number of strictly likelier tokens."""
    candidates: Candidates | None
    """The likeliest there, if the search keeps candidates."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that the search gives back."""

    tokens: tuple[ChosenToken, ...]
    """After the prompt, the stop token included."""
    cumulative_logprob: float
    score: float
    """cumulative_logprob / number of tokens ** length_penalty."""
    is_ended: bool
    """False: it was cut off at max_tokens, or the search was."""

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What becomes of the beams: new beam i is old beam parents[i] and then token_ids[i]."""

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Finished:
    last: _Token
    cumulative_logprob: float
    score: float


class BeamSearch:
    """One search; starts as a single beam without tokens.

    `keep_candidates` is the number of candidates that each position of a hypothesis shall tell.
    """

    def __init__(self, rules: BeamRules, *, keep_candidates: int | None = None) -> None:
        self.rules = rules
        self.is_finished = False
        self._keep = keep_candidates
        self._length = 0
        self._beams = [_Beam(None, 0.0)]
        self._finished: list[_Finished] = []
        """Best first, `width` at most."""

    @property
    def num_beams(self) -> int:
        """Beams whose candidates the next step needs."""
        return len(self._beams)

    @property
    def num_tokens(self) -> int:
        """Tokens of each beam."""
        return self._length

    def step(self, candidates: Sequence[Candidates]) -> BeamStep:
        """Extend every beam by one token, given `rules.num_candidates` of each, or all there are.

        Of equal continuations that of the earlier beam comes first, then the earlier candidate.
        When this was the last step, `is_finished` is true and the result means nothing.
        """
        assert not self.is_finished
        assert len(candidates) == len(self._beams), f"{len(candidates)=} {len(self._beams)=}"
        self._length += 1
        is_last = self._length == self.rules.max_tokens
        parents: list[int] = []
        going: list[_Beam] = []
        for rank, (beam, parent) in enumerate(self._continuations(candidates)):
            assert beam.last is not None
            ends = is_last or beam.last.token_id in self.rules.stop_token_ids
            if ends and rank < self.rules.width:
                self._finish(beam)
            elif not ends:
                going.append(beam)
                parents.append(parent)
            if len(going) == self.rules.width or (is_last and rank + 1 >= self.rules.width):
                break
        self._beams = going
        self.is_finished = is_last or not going or not self._can_improve()
        return BeamStep(
            tuple(parents), tuple(beam.last.token_id for beam in going if beam.last is not None)
        )

    def hypotheses(self) -> list[Hypothesis]:
        """The best `width` sequences, best first.

        Before the search has finished these are the ended ones, and then beams as they are.
        """
        ended = [_hypothesis(entry, self._ends(entry)) for entry in self._finished]
        if self.is_finished:
            return ended
        going = [
            _hypothesis(self._scored(beam.last, beam.cumulative_logprob), is_ended=False)
            for beam in self._beams
            if beam.last is not None
        ]
        return [*ended, *going][: self.rules.width]

    def _continuations(self, candidates: Sequence[Candidates]) -> Iterator[tuple[_Beam, int]]:
        """Beams one token longer, each with its parent, best first."""
        rows = [self._row(index, row) for index, row in enumerate(candidates)]
        kept = [self._kept(row) for row in candidates]
        # Each row is sorted; merge is stable, so ties go to the earlier beam.
        for _, parent, place in heapq.merge(*rows, key=lambda entry: entry[0]):
            before, row = self._beams[parent], candidates[parent]
            logprob = row.logprobs[place]
            rank = 1 + row.logprobs.index(logprob)
            token = _Token(row.token_ids[place], logprob, rank, before.last, kept[parent])
            yield _Beam(token, before.cumulative_logprob + logprob), parent

    def _row(self, index: int, row: Candidates) -> Iterator[tuple[float, int, int]]:
        """Continuations of one beam: (negative log-probability, beam, place in the row)."""
        total = self._beams[index].cumulative_logprob
        may_stop = self._length > self.rules.min_tokens
        for place, (token_id, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True)):
            if may_stop or token_id not in self.rules.stop_token_ids:
                yield -(total + logprob), index, place

    def _kept(self, row: Candidates) -> Candidates | None:
        if self._keep is None:
            return None
        return Candidates(row.token_ids[: self._keep], row.logprobs[: self._keep])

    def _finish(self, beam: _Beam) -> None:
        """Put an ended beam among the best `width`, behind its equals."""
        self._finished.append(self._scored(beam.last, beam.cumulative_logprob))
        self._finished.sort(key=lambda entry: -entry.score)
        del self._finished[self.rules.width :]

    def _scored(self, last: _Token | None, cumulative_logprob: float) -> _Finished:
        assert last is not None
        return _Finished(last, cumulative_logprob, cumulative_logprob / self._penalty(self._length))

    def _penalty(self, length: int) -> float:
        return math.pow(length, self.rules.length_penalty)

    def _can_improve(self) -> bool:
        """Whether a beam that goes on may yet be among the best `width`."""
        if len(self._finished) < self.rules.width:
            return True
        if self.rules.early_stopping is True:
            return False
        length = self._length
        if self.rules.early_stopping == "never" and self.rules.length_penalty > 0.0:
            length = self.rules.max_tokens
        best = self._beams[0].cumulative_logprob / self._penalty(length)
        return best > self._finished[-1].score

    def _ends(self, entry: _Finished) -> bool:
        return entry.last.token_id in self.rules.stop_token_ids


def _hypothesis(entry: _Finished, is_ended: bool) -> Hypothesis:
    tokens: list[ChosenToken] = []
    token: _Token | None = entry.last
    while token is not None:
        tokens.append(ChosenToken(token.token_id, token.logprob, token.rank, token.candidates))
        token = token.before
    return Hypothesis(
        tuple(reversed(tokens)), entry.cumulative_logprob, entry.score, is_ended=is_ended
    )
