"""Beam searches run on an engine, and what they find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from rawpaged.engine.beam_groups import BeamOutput
from rawpaged.engine.engine import Engine
from rawpaged.request import Request, RequestGroup
from rawpaged.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.engine.helpers import poison_free_blocks

CASES = json.loads((GOLDEN / "beam_search.json").read_text())["cases"]
Beams = list[tuple[list[int], float, float, str]]
"""Token ids, cumulative_logprob, score and reason of each, best first."""


def search(name: str, prompt: Sequence[int], **params: Any) -> RequestGroup:
    """A group that runs a beam search."""
    sampling = SamplingParams(use_beam_search=True, **{"max_tokens": 16, **params})
    assert sampling.max_tokens is not None
    return RequestGroup(
        [
            Request(
                f"{name}-{index}",
                prompt,
                sampling,
                max_tokens=sampling.max_tokens,
                sample_index=index,
            )
            for index in range(sampling.n)
        ],
        lockstep=True,
    )


def search_of(case: dict[str, Any], name: str) -> RequestGroup:
    """The search of a golden case."""
    names = ("max_tokens", "min_tokens", "stop_token_ids", "length_penalty", "early_stopping")
    return search(name, case["prompt_ids"], n=case["width"], **{k: case[k] for k in names})


def told(beams: Sequence[BeamOutput]) -> Beams:
    return [
        (
            beam.hypothesis.token_ids,
            beam.hypothesis.cumulative_logprob,
            beam.hypothesis.score,
            beam.finish_reason.value,
        )
        for beam in beams
    ]


def run_searches(
    engine: Engine,
    groups: Sequence[RequestGroup],
    others: Sequence[Request] = (),
) -> dict[str, Beams]:
    """What each search found, by the name of its first request.

    Blocks are checked after every step, and poisoned if free.
    """
    for group in groups:
        engine.add_group(group)
    for other in others:
        engine.add_group(RequestGroup([other]))
    found: dict[str, Beams] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            if output.beams is not None:
                assert output.request_id not in found
                found[output.request_id] = told(output.beams)
        engine.scheduler.check_integrity()
        poison_free_blocks(engine)
    assert engine.scheduler.num_used_blocks == 0
    return found


def assert_golden(beams: Beams, case: dict[str, Any], *, rel: float) -> None:
    """What transformers found, in its order; scores may differ by `rel`."""
    assert [ids for ids, *_ in beams] == [beam["token_ids"] for beam in case["beams"]]
    scores = [beam["score"] for beam in case["beams"]]
    assert [score for _, _, score, _ in beams] == pytest.approx(scores, rel=rel)
    for ids, total, score, reason in beams:
        assert score == total / len(ids) ** case["length_penalty"]
        assert reason == ("stop" if ids[-1] in case["stop_token_ids"] else "length")
