"""The beam searches under way: the beams of one are requests of a group in lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rawpaged.engine.beam_search import BeamSearch, Candidates, Hypothesis, beam_rules
from rawpaged.engine.sampler import SampledToken
from rawpaged.request import FinishReason, Request, RequestGroup
from rawpaged.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One sequence that a search gives back."""

    hypothesis: Hypothesis
    finish_reason: FinishReason
    stop_reason: int | None
    """The stop token that ended it, unless that is an end-of-sequence token."""


class BeamGroups:
    """Takes each search on by a token when all of its beams have sampled.

    A group is a `RequestGroup` in lockstep. Its first request computes the prompt; from the first
    token on each of its requests is one beam, and another after every step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._searches: dict[RequestGroup, BeamSearch] = {}

    def __len__(self) -> int:
        """Searches under way."""
        return len(self._searches)

    def add(self, group: RequestGroup) -> None:
        """Begin a search."""
        first = group.requests[0]
        keep = first.sampling_params.logprobs
        self._searches[group] = BeamSearch(beam_rules(first), keep_candidates=keep)

    def advance(self, sampled: Mapping[str, SampledToken]) -> list[RequestGroup]:
        """Give beams their next tokens after a step; returns the groups that made one.

        `sampled` holds what was sampled in the step, with candidates as log-probabilities.
        """
        advanced = []
        for group, search in self._searches.items():
            rows = [
                _candidates(sampled[request.request_id])
                for request in group.requests
                if request.request_id in sampled
            ]
            if not rows:
                continue
            step = search.step(rows)
            advanced.append(group)
            if not search.is_finished:
                self._scheduler.reorder(tuple(group.requests), step.parents, step.token_ids)
        return advanced

    def is_finished(self, group: RequestGroup) -> bool:
        """Whether the last step was the search's last."""
        return self._searches[group].is_finished

    def has_begun(self, group: RequestGroup) -> bool:
        """Whether the group's prompt is computed and its beams have tokens."""
        search = self._searches.get(group)
        return search is not None and search.num_tokens > 0

    def remove(self, group: RequestGroup, cut_off: FinishReason) -> tuple[BeamOutput, ...]:
        """What a search has found, best first, nothing before its first token; it is forgotten.

        The group's requests are the caller's to end. `cut_off` is why sequences end that no stop
        token ended. A search that has not finished was cut off as a whole: it might have found
        better ones.
        """
        search, first = self._searches.pop(group), group.requests[0]
        return tuple(
            BeamOutput(hypothesis, FinishReason.STOP, _stop_reason(hypothesis, first))
            if hypothesis.is_ended and search.is_finished
            else BeamOutput(hypothesis, cut_off, None)
            for hypothesis in search.hypotheses()
        )


def _candidates(token: SampledToken) -> Candidates:
    """The likeliest tokens; the first entry is the chosen one again."""
    assert token.logprobs is not None
    return Candidates(token.logprobs.token_ids[1:], token.logprobs.logprobs[1:])


def _stop_reason(hypothesis: Hypothesis, request: Request) -> int | None:
    token_id = hypothesis.tokens[-1].token_id
    is_eos = token_id in request.eos_token_ids and not request.sampling_params.ignore_eos
    return None if is_eos else token_id
