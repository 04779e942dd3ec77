"""What ends a request, and what of its text is shown: stop strings, stop tokens, lengths."""

from __future__ import annotations

from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.outputs import CompletionOutput
from rawpaged.tokenization.tokenizer import Tokenizer
from tests.tiny import EOS, LLAMA, VOCAB_SIZE, tiny_config

PROMPT = "the other"
LENGTH = 48


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    """Random letters, always the same ones."""
    given = {"seed": 11, "max_tokens": LENGTH, "logit_bias": letters(tokenizer_of(llm)), **params}
    (output,) = llm.generate(PROMPT, SamplingParams(**given), use_tqdm=False)
    return output.outputs[0]


def tokenizer_of(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


def letters(tokenizer: Tokenizer) -> dict[int, float]:
    """A bias that leaves only tokens of one or more lower-case letters or spaces."""
    texts = {token_id: tokenizer.token_text(token_id) for token_id in range(VOCAB_SIZE)}
    return {
        token_id: 50.0
        for token_id, text in texts.items()
        if text.isascii() and text == text.lower() and text.replace(" ", "x").isalpha()
    }


def prefix_text(llm: LLM, token_ids: list[int], count: int) -> str:
    return tokenizer_of(llm).decode(token_ids[:count])


def tokens_up_to(llm: LLM, token_ids: list[int], end: int) -> list[int]:
    """The fewest tokens whose text reaches character `end`."""
    for count in range(len(token_ids) + 1):
        if len(prefix_text(llm, token_ids, count)) >= end:
            return token_ids[:count]
    raise AssertionError("the text is too short")


@pytest.fixture(scope="module")
def base(llm: LLM) -> CompletionOutput:
    sample = complete(llm)
    assert sample.finish_reason == "length"
    assert sample.text.isascii()
    assert len(sample.text) > LENGTH
    return sample


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings(llm: LLM, base: CompletionOutput, length: int, include: bool) -> None:
    """Cut out of the text at any place, so over token boundaries too."""
    text = base.text
    for start in range(0, len(text) - length + 1, 3):
        stop = text[start : start + length]
        found = text.index(stop)
        sample = complete(llm, stop=stop, include_stop_str_in_output=include)
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.text == text[: found + length if include else found]
        assert sample.token_ids == tokens_up_to(llm, base.token_ids, found + length)


def test_the_stop_string_that_ends_first_wins(llm: LLM, base: CompletionOutput) -> None:
    late, early = base.text[30:34], base.text[10:13]
    sample = complete(llm, stop=["absent", late, early])
    assert sample.stop_reason == early
    assert sample.text == base.text[: base.text.index(early)]


def test_the_beginning_of_a_stop_string_is_shown_at_the_end(
    llm: LLM, base: CompletionOutput
) -> None:
    sample = complete(llm, stop=[base.text[-4:] + "!", base.text[-1] + "?"])
    assert (sample.text, sample.finish_reason) == (base.text, "length")
    assert sample.stop_reason is None


def test_min_tokens_before_a_stop_string(llm: LLM, base: CompletionOutput) -> None:
    for min_tokens in range(0, 30, 4):
        passed = len(prefix_text(llm, base.token_ids, min_tokens))
        stop = base.text[2]
        found = base.text.index(stop, passed)
        sample = complete(llm, stop=stop, min_tokens=min_tokens)
        assert sample.text == base.text[:found]
        assert len(sample.token_ids) > min_tokens


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ids(llm: LLM, base: CompletionOutput, include: bool) -> None:
    for token_id in dict.fromkeys(base.token_ids[:20]):
        first = base.token_ids.index(token_id)
        sample = complete(llm, stop_token_ids=[token_id], include_stop_str_in_output=include)
        assert (sample.finish_reason, sample.stop_reason) == ("stop", token_id)
        assert sample.token_ids == base.token_ids[: first + 1]
        assert sample.text == prefix_text(llm, base.token_ids, first + include)


def test_a_stop_token_lets_out_what_was_held_back(llm: LLM, base: CompletionOutput) -> None:
    """Half a stop string before the stop token is text like any other."""
    index = next(i for i in range(3, 20) if base.token_ids.index(base.token_ids[i]) == i)
    text = prefix_text(llm, base.token_ids, index)
    sample = complete(llm, stop=text[-1] + "?", stop_token_ids=[base.token_ids[index]])
    assert sample.text == text
    assert sample.stop_reason == base.token_ids[index]


def test_min_tokens_forbids_stop_tokens(llm: LLM) -> None:
    """Not only does it not end there: the token is not drawn."""
    sample = complete(llm, logit_bias={7: 100.0}, stop_token_ids=[7], min_tokens=5)
    assert len(sample.token_ids) == 6
    assert 7 not in sample.token_ids[:5]
    assert sample.stop_reason == sample.token_ids[5] == 7


def test_end_of_sequence(llm: LLM) -> None:
    sample = complete(llm, logit_bias={EOS: 100.0})
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert sample.token_ids == [EOS]
    assert sample.text == ""


def test_ignore_eos(llm: LLM) -> None:
    sample = complete(llm, logit_bias={EOS: 100.0}, ignore_eos=True, skip_special_tokens=False)
    assert sample.finish_reason == "length"
    assert sample.token_ids == [EOS] * LENGTH
    assert sample.text == "</s>" * LENGTH


def test_ignore_eos_does_not_ignore_stop_token_ids(llm: LLM) -> None:
    sample = complete(llm, logit_bias={EOS: 100.0}, ignore_eos=True, stop_token_ids=[EOS])
    assert (sample.token_ids, sample.stop_reason) == ([EOS], EOS)


def test_min_tokens_forbids_the_end_of_sequence(llm: LLM) -> None:
    sample = complete(llm, logit_bias={EOS: 100.0}, min_tokens=4)
    assert EOS not in sample.token_ids[:4]
    assert sample.token_ids[4:] == [EOS]


def test_max_tokens(llm: LLM, base: CompletionOutput) -> None:
    sample = complete(llm, max_tokens=1)
    assert (sample.token_ids, sample.finish_reason) == (base.token_ids[:1], "length")


def test_no_max_tokens_means_all_that_is_left() -> None:
    with LLM(tiny_config(max_model_len=64)) as llm:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        (output,) = llm.generate(list(range(10)), params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 54


def test_the_longest_request_that_fits() -> None:
    """As many tokens as the whole pool holds."""
    with LLM(LLAMA, num_threads=1, num_gpu_blocks_override=4, max_num_batched_tokens=16) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        (output,) = llm.generate(list(range(63)), params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
