"""What a cache of bytes costs in accuracy, bounded: logits, log-probabilities, greedy tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bench.perplexity import DEFAULT_TEXT
from rawpaged import LLM, SamplingParams
from tests.engine.helpers import LLAMA_FAMILY, golden, recorded_logits, request, run, tiny_engine

Float = npt.NDArray[Any]
WINDOW = 384
RMS_ERROR = {"fp8_e4m3": (0.02, 0.25), "int8": (0.005, 0.1)}
"""Of logits of the random tiny models, over their standard deviation: at least, at most."""


@pytest.mark.parametrize("kv_cache_dtype", list(RMS_ERROR))
@pytest.mark.parametrize("name", LLAMA_FAMILY)
def test_logits_of_tiny_models(name: str, kv_cache_dtype: str) -> None:
    """Against transformers' in float32, at each position, by way of prefix hits and decoding."""
    expected = golden(name)
    ids = expected["input_ids"].tolist()
    engine = tiny_engine(name, kv_cache_dtype=kv_cache_dtype, num_blocks=600)
    lengths = range(1, len(ids) + 1)
    run(engine, [request(str(n), ids[:n], max_tokens=1) for n in lengths])
    logits = recorded_logits(engine)
    engine.close()
    got = np.stack([np.frombuffer(logits[str(n)][0], np.float32) for n in lengths])
    error = np.sqrt(np.square(got - expected["logits"]).mean()) / expected["logits"].std()
    low, high = RMS_ERROR[kv_cache_dtype]
    assert low < error < high


def test_decoding_gives_the_bits_of_a_prompt() -> None:
    """The cache holds what a prompt would have put there, whoever wrote it."""
    prompt = [(11 * i) % 320 for i in range(50)]
    for kv_cache_dtype in RMS_ERROR:
        engine = tiny_engine(kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
        tokens = run(engine, [request("a", prompt, max_tokens=20)])["a"]
        run(engine, [request("b", prompt + tokens[:-1], max_tokens=1)])
        logits = recorded_logits(engine)
        engine.close()
        assert logits["a"][-1] == logits["b"][0]


# SmolLM2: the numbers of docs/kv-cache.md, on less text and with room for other processors


def open_smollm2(kv_cache_dtype: str) -> LLM:
    return LLM(
        "smollm2-135m",
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        num_gpu_blocks_override=256,
        max_model_len=512,
    )


def predictions(llm: LLM) -> tuple[Float, Float]:
    """Log-probability of each token of a text, and which was the likeliest there."""
    assert llm.tokenizer is not None
    token_ids = llm.tokenizer.encode(DEFAULT_TEXT.read_text())[:WINDOW]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([token_ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    logprobs, likeliest = [], []
    for token_id, entry in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        logprobs.append(entry[token_id].logprob)
        likeliest.append(max(entry, key=lambda each: entry[each].logprob))
    return np.array(logprobs), np.array(likeliest)


@pytest.fixture(scope="module")
def float_predictions() -> tuple[Float, Float]:
    with open_smollm2("auto") as llm:
        return predictions(llm)


@pytest.mark.model
@pytest.mark.parametrize(
    ("kv_cache_dtype", "most_error", "least_equal"), [("fp8", 0.13, 0.9), ("int8", 0.1, 0.92)]
)
def test_predictions_of_smollm2(
    float_predictions: tuple[Float, Float],
    kv_cache_dtype: str,
    most_error: float,
    least_equal: float,
) -> None:
    with open_smollm2(kv_cache_dtype) as llm:
        logprobs, likeliest = predictions(llm)
    difference = logprobs - float_predictions[0]
    assert 0.02 < np.abs(difference).mean() < most_error
    assert abs(difference.mean()) < 0.03  # 3 % of perplexity
    assert (likeliest == float_predictions[1]).mean() > least_equal
