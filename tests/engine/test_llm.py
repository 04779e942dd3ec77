"""LLM.generate and chat: prompts, samples, seeds, log-probabilities."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine.engine_thread import EngineThread
from rawpaged.errors import InvalidRequestError
from rawpaged.outputs import RequestOutput
from tests.engine.helpers import golden
from tests.tiny import VOCAB_SIZE, tiny_config


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **params})


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "ignore_eos": True, "max_tokens": 8, **params})


def generate(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(output: RequestOutput) -> list[list[int]]:
    """Token ids of each sample."""
    assert [sample.index for sample in output.outputs] == list(range(len(output.outputs)))
    return [sample.token_ids for sample in output.outputs]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 90))] for _ in range(20)]


def test_one_prompt_of_token_ids(llm: LLM) -> None:
    expected = golden("llama")
    prompt = expected["input_ids"][: int(expected["greedy_prompt_len"])].tolist()
    ids = expected["greedy_ids"].tolist()
    for given in (prompt, tuple(prompt), [prompt]):
        (output,) = generate(llm, given, greedy(max_tokens=len(ids)))
        assert output.prompt_token_ids == prompt
        assert output.prompt is None
        assert output.finished
        (sample,) = output.outputs
        assert (sample.index, sample.token_ids, sample.finish_reason) == (0, ids, "length")
        assert sample.stop_reason is None
        assert sample.logprobs is None
        assert sample.cumulative_logprob is None
        assert output.prompt_logprobs is None


def test_one_prompt_of_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (output,) = generate(llm, "the café", greedy())
    assert output.prompt == "the café"
    assert output.prompt_token_ids == llm.tokenizer.encode("the café")
    (same,) = generate(llm, output.prompt_token_ids, greedy())
    assert same.outputs == output.outputs
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_default_parameters(llm: LLM) -> None:
    (output,) = generate(llm, [5, 6, 7])
    (sample,) = output.outputs
    assert sample.finish_reason == "stop" or len(sample.token_ids) == 16


def test_no_prompt(llm: LLM) -> None:
    assert generate(llm, []) == []


def test_results_are_in_order_and_those_of_solo_runs(llm: LLM, prompts: list[list[int]]) -> None:
    params = [greedy(max_tokens=3 + i % 5) for i in range(len(prompts))]
    outputs = generate(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == each.max_tokens
        assert output.outputs == generate(llm, prompt, each)[0].outputs


def test_one_set_of_parameters_serves_all(llm: LLM, prompts: list[list[int]]) -> None:
    outputs = generate(llm, prompts, greedy(max_tokens=2))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2] * len(prompts)


def test_wrong_number_of_parameters(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineThread, "submit")
    with pytest.raises(InvalidRequestError, match="2 sampling_params were given for 3") as info:
        generate(llm, [[1], [2], [3]], [greedy(), greedy()])
    assert info.value.param == "sampling_params"


def test_samples_differ_and_repeat(llm: LLM) -> None:
    """Sample i is the same whatever n is, and sample 0 that of n=1."""
    four, again, two, one = (
        tokens(generate(llm, [1, 2, 3], sampled(n=n))[0]) for n in (4, 4, 2, 1)
    )
    assert len({tuple(sample) for sample in four}) == 4
    assert again == four
    assert two == four[:2]
    assert one == four[:1]


def test_more_samples_than_run_at_once(llm: LLM) -> None:
    expected = tokens(generate(llm, [1, 2, 3], sampled(n=7))[0])
    with LLM(tiny_config(max_num_seqs=2)) as small:
        assert tokens(generate(small, [1, 2, 3], sampled(n=7))[0]) == expected


def test_a_seed_holds_whatever_else_runs(llm: LLM, prompts: list[list[int]]) -> None:
    alone = generate(llm, prompts[0], sampled(seed=3))
    among = generate(llm, prompts, [sampled(seed=3), *[sampled(seed=4)] * (len(prompts) - 1)])
    assert among[0].outputs == alone[0].outputs
    other = generate(llm, prompts[0], sampled(seed=4))
    assert other[0].outputs != alone[0].outputs


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_every_seed_of_64_bits(llm: LLM, seed: int) -> None:
    first, second = (generate(llm, [1], sampled(seed=seed))[0].outputs for _ in range(2))
    assert first == second


def test_without_a_seed_runs_differ(llm: LLM) -> None:
    first, second = (generate(llm, [1], sampled(seed=None))[0].outputs for _ in range(2))
    assert first != second


def test_greedy_logprobs(llm: LLM) -> None:
    (output,) = generate(llm, "the", greedy(logprobs=4))
    (sample,) = output.outputs
    assert sample.logprobs is not None
    assert llm.tokenizer is not None
    assert len(sample.logprobs) == len(sample.token_ids)
    for token_id, position in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert [entry.rank for entry in position.values()] == [1, 2, 3, 4]
        values = [entry.logprob for entry in position.values()]
        assert values == sorted(values, reverse=True)
        for each, entry in position.items():
            assert entry.decoded_token == llm.tokenizer.token_text(each)
    chosen = zip(sample.token_ids, sample.logprobs, strict=True)
    total = sum(position[token_id].logprob for token_id, position in chosen)
    assert sample.cumulative_logprob == pytest.approx(total, rel=1e-6)


def test_sampled_logprobs(llm: LLM) -> None:
    """The drawn token comes first, then the likeliest, whatever bias and temperature did."""
    bias = {5: 100.0}
    (output,) = generate(llm, "the", sampled(logprobs=2, logit_bias=bias, temperature=2.0))
    (sample,) = output.outputs
    (plain,) = generate(llm, "the", greedy(logprobs=VOCAB_SIZE, max_tokens=1))[0].outputs
    assert sample.token_ids == [5] * 8
    assert sample.logprobs is not None
    assert plain.logprobs is not None
    first, all_tokens = sample.logprobs[0], plain.logprobs[0]
    assert list(first) == [5, *list(all_tokens)[:2]]
    for token_id, entry in first.items():
        assert entry == all_tokens[token_id]


@pytest.mark.parametrize("count", [0, VOCAB_SIZE])
def test_number_of_logprobs(llm: LLM, count: int) -> None:
    (sample,) = generate(llm, [1, 2], greedy(logprobs=count))[0].outputs
    assert sample.logprobs is not None
    for position in sample.logprobs:
        assert len(position) == max(count, 1)
        if count == VOCAB_SIZE:
            total = sum(np.exp(entry.logprob) for entry in position.values())
            assert total == pytest.approx(1.0, abs=1e-5)


def test_prompt_logprobs(llm: LLM) -> None:
    expected = golden("llama")
    ids = expected["input_ids"].tolist()
    logits = expected["logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for _ in range(2):  # the second time the prompt could be in the prefix cache
        (output,) = generate(llm, ids, greedy(prompt_logprobs=2, n=2))
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None
        entries = output.prompt_logprobs[1:]
        for row, token_id, entry in zip(logprobs[:-1], ids[1:], entries, strict=True):
            assert entry is not None
            assert next(iter(entry)) == token_id
            assert entry[token_id].logprob == pytest.approx(row[token_id], abs=1e-3)
            assert entry[token_id].rank == 1 + (row > row[token_id]).sum()
            assert set(entry) == {token_id, *np.argsort(-row)[:2].tolist()}


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    assert generate(llm, [9], greedy(prompt_logprobs=1))[0].prompt_logprobs == [None]


def test_prefix_hits_are_counted() -> None:
    with LLM(tiny_config()) as llm:
        prompt = list(range(40))
        counts = [generate(llm, prompt, greedy())[0].num_cached_tokens for _ in range(2)]
        assert counts == [0, 32]
    with LLM(tiny_config(enable_prefix_caching=False)) as llm:
        counts = [generate(llm, prompt, greedy())[0].num_cached_tokens for _ in range(2)]
        assert counts == [0, 0]


def test_chat(llm: LLM) -> None:
    assert llm.tokenizer is not None
    hello = [{"role": "user", "content": "hello"}]
    bye = [{"role": "user", "content": "bye"}]
    one = llm.chat(hello, greedy(), use_tqdm=False)
    two = llm.chat([hello, bye], greedy(), use_tqdm=False)
    assert one[0].outputs == two[0].outputs
    assert [llm.tokenizer.decode(output.prompt_token_ids) for output in two] == [
        "user: hello\nassistant: ",
        "user: bye\nassistant: ",
    ]
    assert one[0].outputs == generate(llm, "user: hello\nassistant: ", greedy())[0].outputs


def test_chat_without_a_tokenizer() -> None:
    with LLM(tiny_config()) as llm, pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}])
