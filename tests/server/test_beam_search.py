"""Beam search through HTTP: what is taken, what is refused, and the scores of the choices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rawpaged.sampling_params import RequestOutputKind
from tests.server.client import Answer, chat, complete
from tests.server.conftest import Server

Send = Callable[..., Answer]
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 2}

REFUSED: dict[str, Any] = {
    "stream": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "stop": "x",
    "length_penalty": 10.5,
    "early_stopping": "sometimes",
}


@pytest.mark.parametrize("send", [complete, chat])
def test_fields_reach_the_engine(server: Server, send: Send) -> None:
    answer = send(
        server.url,
        **BEAMS,
        length_penalty=-0.5,
        early_stopping="never",
        temperature=0,
        stop_token_ids=[7],
        min_tokens=1,
        include_stop_str_in_output=True,
        ignore_eos=True,
    )
    assert answer.status == 200, answer.body
    params = server.engine.calls[-1][1]
    assert params.use_beam_search
    assert (params.n, params.length_penalty, params.early_stopping) == (3, -0.5, "never")
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("send", [complete, chat])
def test_scores_of_the_choices(server: Server, send: Send) -> None:
    """Large ones are told as they are; minus infinity, which JSON lacks, as -9999."""
    choices = send(server.url, **BEAMS).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["cumulative_logprob"] for choice in choices] == [-20000.0, -40000.0, -9999.0]
    assert [choice["beam_score"] for choice in choices] == [-10000.0, -20000.0, -9999.0]


@pytest.mark.parametrize("send", [complete, chat])
def test_samples_have_no_scores(server: Server, send: Send) -> None:
    for choice in send(server.url, n=2, max_tokens=2).json["choices"]:
        assert not {"cumulative_logprob", "beam_score"} & set(choice)


def test_a_prompt_that_is_scored_only_has_no_beams_to_score(server: Server) -> None:
    answer = complete(server.url, use_beam_search=True, echo=True, max_tokens=0, logprobs=0)
    assert "beam_score" not in answer.json["choices"][0]


@pytest.mark.parametrize("send", [complete, chat])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it(server: Server, send: Send, name: str) -> None:
    answer = send(server.url, **BEAMS, **{name: REFUSED[name]})
    assert answer.status == 400
    assert answer.error["param"] == ("use_beam_search" if name == "stream" else name)
    assert name in answer.error["message"]


@pytest.mark.parametrize("send", [complete, chat])
def test_values_that_ask_for_nothing_pass(server: Server, send: Send) -> None:
    neutral = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 5, "stop": []}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    assert send(server.url, **BEAMS, **neutral, logit_bias={}).status == 200
    alone = {"use_beam_search": False, "length_penalty": 1, "early_stopping": False}
    assert send(server.url, **alone).status == 200
    assert send(server.url, **dict.fromkeys(alone)).status == 200


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_fields_of_a_search_without_one(server: Server, name: str, value: Any) -> None:
    answer = complete(server.url, **{name: value})
    assert answer.status == 400
    assert answer.error["param"] == name
    assert answer.error["message"].startswith(f"{name}={json.dumps(value)} is for beam search")
