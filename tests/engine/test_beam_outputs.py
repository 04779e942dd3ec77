"""Beam search as users see it: texts, reasons, log-probabilities, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rawpaged import LLM, AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.errors import InvalidRequestError
from rawpaged.outputs import RequestOutput
from rawpaged.sampling_params import MAX_BEAM_CANDIDATES
from tests.tiny import EOS, LLAMA, engine_of, tiny_config

PROMPT = "the other three"


def find(llm: LLM, prompt: str | list[int] = PROMPT, **params: Any) -> RequestOutput:
    given = {"use_beam_search": True, "n": 4, "max_tokens": 12, "temperature": 0.0, **params}
    (output,) = llm.generate([prompt], SamplingParams(**given), use_tqdm=False)
    assert output.finished
    assert [sample.index for sample in output.outputs] == list(range(given["n"]))
    scores = [s.beam_score for s in output.outputs if s.beam_score is not None]
    assert len(scores) == given["n"]
    assert scores == sorted(scores, reverse=True)
    assert engine_of(llm).scheduler.num_used_blocks == 0
    assert not llm._thread._processor._samples
    return output


def some_stops(llm: LLM) -> list[int]:
    """Tokens that beams hold in their middle, so that they end there."""
    outputs = find(llm).outputs
    return sorted({outputs[0].token_ids[3], outputs[-1].token_ids[6]})


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_prompt_that_is_cached_from_end_to_end(llm: LLM, num_blocks: int) -> None:
    prompt = [7, 9] * (num_blocks * engine_of(llm).scheduler.config.block_size // 2)
    first, again = find(llm, prompt), find(llm, prompt)
    assert again.num_cached_tokens == len(prompt)
    assert [sample.token_ids for sample in again.outputs] == [
        sample.token_ids for sample in first.outputs
    ]


def test_texts_and_reasons(llm: LLM) -> None:
    assert llm.tokenizer is not None
    stops = some_stops(llm)
    shown = {}
    for include in (False, True):
        output = find(llm, stop_token_ids=stops, include_stop_str_in_output=include)
        ended = [sample for sample in output.outputs if sample.finish_reason == "stop"]
        assert ended
        for sample in output.outputs:
            ids = sample.token_ids
            assert all(token_id not in stops for token_id in ids[:-1])
            if sample in ended:
                assert sample.stop_reason == ids[-1]
                assert ids[-1] in stops
                visible = ids if include else ids[:-1]
            else:
                assert (sample.finish_reason, sample.stop_reason) == ("length", None)
                assert len(ids) == 12
                visible = ids
            assert sample.text == llm.tokenizer.decode(visible)
        shown[include] = [sample.token_ids for sample in output.outputs]
    assert shown[False] == shown[True]


def with_eos(directory: Path, eos: int) -> str:
    """A copy of the tiny model that ends with another token."""
    shutil.copytree(LLAMA, directory)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**settings, "eos_token_id": eos}))
    return str(directory)


def test_end_of_sequence(llm: LLM, tmp_path: Path) -> None:
    """Ends a beam without a stop_reason, unless it is ignored; stop_token_ids count in any case."""
    params = {"n": 3, "max_tokens": 3, "length_penalty": 0.0}
    prompt = [5, 6, 7]
    free = find(llm, prompt, ignore_eos=True, **params)
    eos = free.outputs[0].token_ids[0]
    with LLM(tiny_config(model=with_eos(tmp_path / "model", eos))) as other:
        ended = find(other, prompt, **params).outputs[0]
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([eos], "stop", None)
        again = find(other, prompt, ignore_eos=True, **params)
        assert [s.token_ids for s in again.outputs] == [s.token_ids for s in free.outputs]
        both = find(other, prompt, ignore_eos=True, stop_token_ids=[eos], **params).outputs[0]
        assert (both.token_ids, both.finish_reason, both.stop_reason) == ([eos], "stop", eos)


@pytest.mark.parametrize(("min_tokens", "num_logprobs"), [(0, 3), (5, 0), (5, 20)])
def test_sums_are_those_of_the_prompt_scored(llm: LLM, min_tokens: int, num_logprobs: int) -> None:
    """Each output given back as a prompt has the log-probability that the search told.

    That holds for fewer log-probabilities than a search needs, and for more.
    """
    output = find(llm, logprobs=num_logprobs, stop_token_ids=some_stops(llm), min_tokens=min_tokens)
    num_prompt = len(output.prompt_token_ids)
    for sample in output.outputs:
        assert len(sample.token_ids) > min_tokens or sample.finish_reason == "length"
        whole = output.prompt_token_ids + sample.token_ids
        score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_logprobs)
        (scored,) = llm.generate([whole], score, use_tqdm=False)
        assert scored.prompt_logprobs is not None
        expected = scored.prompt_logprobs[num_prompt:]
        assert sample.logprobs == expected
        total = sum(
            position[token_id].logprob
            for position, token_id in zip(sample.logprobs or [], sample.token_ids, strict=True)
        )
        assert sample.cumulative_logprob == pytest.approx(total)
        assert sample.beam_score == pytest.approx(total / len(sample.token_ids))


def test_prompt_logprobs(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (expected,) = llm.generate([PROMPT], plain, use_tqdm=False)
    assert find(llm, prompt_logprobs=2).prompt_logprobs == expected.prompt_logprobs
    assert find(llm).prompt_logprobs is None


def test_one_beam_without_ends_is_greedy(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (expected,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    (sample,) = find(llm, n=1, ignore_eos=True).outputs
    assert sample.token_ids == expected.outputs[0].token_ids
    assert sample.text == expected.outputs[0].text


def test_a_prompt_seen_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = [9] * 50
    first, second = find(llm, prompt), find(llm, prompt)
    assert second.num_cached_tokens > 0
    assert second.outputs == first.outputs


def test_only_the_final_output_is_sent(async_engine: AsyncEngine) -> None:
    async def read(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(use_beam_search=True, n=3, max_tokens=9, output_kind=kind)
        return [output async for output in async_engine.generate(PROMPT, params)]

    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
        (output,) = asyncio.run(read(kind))
        assert output.finished
        assert len(output.outputs) == 3
    with pytest.raises(InvalidRequestError, match="output_kind=DELTA"):
        asyncio.run(read(RequestOutputKind.DELTA))


def test_aborted_by_its_user(async_engine: AsyncEngine) -> None:
    async def abort() -> list[RequestOutput]:
        params = SamplingParams(use_beam_search=True, n=3, max_tokens=200, ignore_eos=True)
        stream = async_engine.generate(PROMPT, params, request_id="a")
        await async_engine.abort("a")
        return [output async for output in stream]

    (output,) = asyncio.run(abort())
    assert output.finished
    assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 3
    lengths = {len(sample.token_ids) for sample in output.outputs}
    assert len(lengths) == 1
    assert lengths.pop() < 200
    assert engine_of(async_engine).scheduler.num_used_blocks == 0


@pytest.mark.parametrize(
    ("flags", "params", "message"),
    [
        ({}, {"n": 60, "stop_token_ids": list(range(3, 270))}, "60 beams and 268 stop tokens"),
        ({"max_num_seqs": 3}, {}, "max_num_seqs=3"),
        ({"max_num_batched_tokens": 3}, {}, "max_num_batched_tokens=3"),
        ({"num_gpu_blocks_override": 16}, {"n": 16, "max_tokens": 20}, "the pool has 16"),
    ],
)
def test_what_could_never_run(flags: dict[str, Any], params: dict[str, Any], message: str) -> None:
    """Refused before anything runs, with the numbers; the engine goes on."""
    with LLM(tiny_config(model=LLAMA, **flags)) as llm:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            find(llm, [5] * 20, **params)
        assert caught.value.param == "n"
        find(llm, [5] * 20, n=2, max_tokens=4)


REFUSED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "stop": ["a" * 1000],
    "output_kind": RequestOutputKind.DELTA,
    "length_penalty": float("nan"),
    "early_stopping": 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_it(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(use_beam_search=True, n=2, **{name: REFUSED[name]})
    assert caught.value.param == name
    assert len(str(caught.value)) < 250


def test_the_most_candidates(llm: LLM) -> None:
    """As many beams and stop tokens as there may be; one more beam is refused."""
    stops = list(range(MAX_BEAM_CANDIDATES - 32))
    assert EOS in stops
    output = find(llm, n=32, max_tokens=3, stop_token_ids=stops, early_stopping=True)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 32
    with pytest.raises(InvalidRequestError, match="stop tokens"):
        find(llm, n=33, stop_token_ids=stops)


def test_a_search_of_the_whole_vocabulary(tmp_path: Path) -> None:
    """A beam can choose from no more than there is."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = json.loads((Path(LLAMA) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 16}))
    with LLM(tiny_config(model=str(directory), load_format="dummy", max_logprobs=16)) as llm:
        stops = [EOS, *range(5, 10)]
        output = find(llm, [3, 4], n=10, stop_token_ids=stops)
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 10
        with pytest.raises(InvalidRequestError, match="more than 16 together"):
            find(llm, [3, 4], n=11, stop_token_ids=stops)
