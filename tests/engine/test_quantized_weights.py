"""GGUF files whose weights stay in blocks: close to the dequantised ones, and promise 3."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.config import EngineConfig
from rawpaged.cpu.backend import CpuBackend
from rawpaged.engine.loading import plan_only
from rawpaged.errors import ConfigError
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import load_weights
from tests.engine.helpers import recorded_logits, run, tiny_engine
from tests.engine.test_bit_equality import requests
from tests.tiny import LLAMA, tiny_config, write_tokenizer
from tests.weights.block_model import BLOCK_MODEL, k_m_types, write_block_model
from tests.weights.builders import write_gguf

PROMPTS = [[(7 * i + 3 * j) % 320 for i in range(50)] for j in range(4)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def prompt_logprobs(path: Path, **flags: Any) -> npt.NDArray[np.float64]:
    """Of every token of PROMPTS but the first of each."""
    with LLM(**{"model": str(path), "num_threads": 1, "max_model_len": 64, **flags}) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    values = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            values.append(entry[token_id].logprob)
    return np.array(values)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_near_what_is_dequantised(tmp_path: Path, tokenizer: str, type_name: str) -> None:
    """Rows of q and k in another order would be far off."""
    path = write_gguf(tmp_path / "x.gguf", type_name=type_name)
    expected = prompt_logprobs(path, dtype="float32", tokenizer=tokenizer)
    for flags in ({"dtype": "auto"}, {"dtype": "float32", "quantization": "gguf"}):
        got = prompt_logprobs(path, tokenizer=tokenizer, **flags)
        assert 0 < np.abs(got - expected).mean() < 0.02
        assert np.abs(got - expected).max() < 0.2


@pytest.mark.parametrize("type_of", [k_m_types, lambda name: "Q4_1"], ids=["K", "Q4_1"])
def test_bits_do_not_depend_on_batch_chunks_or_threads(tmp_path: Path, type_of: Any) -> None:
    path = str(write_block_model(tmp_path / "x.gguf", type_of))

    def logits(**params: Any) -> dict[str, list[bytes]]:
        engine = tiny_engine(path, dtype="bfloat16", keep_quantized=True, **params)
        batches = [requests(9)]
        if params["max_num_batched_tokens"] == 128:
            batches = [[each] for each in requests(9)]
        for batch in batches:
            run(engine, batch)
        engine.close()
        return recorded_logits(engine)

    expected = logits(enable_prefix_caching=False, max_num_batched_tokens=128)
    assert all(np.isfinite(np.frombuffer(row, np.float32)).all() for row in expected["0"])
    for params in (
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 33, "num_threads": 2},
        {"max_num_batched_tokens": 64, "num_threads": 3, "num_blocks": 12},
    ):
        assert logits(**params) == expected


def test_weights_take_what_the_plan_says(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_block_model(tmp_path / "x.gguf", k_m_types)
    config = EngineConfig(model=str(path))
    _, plan = plan_only(config)
    assert plan.weights_types == "Q6_K, Q4_K, Q5_K and Q5_0"
    backend = CpuBackend(dtype="bfloat16", num_threads=1)
    checkpoint = open_checkpoint(str(path))
    kept = load_weights(checkpoint, backend, keep_quantized=True)
    assert kept.lm_head is kept.embed_tokens
    # Norms are counted with two bytes and have four; there are biases of zeros.
    assert plan.weights_bytes < kept.nbytes < 1.03 * plan.weights_bytes
    assert kept.nbytes < 0.4 * load_weights(checkpoint, backend).nbytes
    backend.close()
    _, dequantised = plan_only(EngineConfig(model=str(path), dtype="bfloat16"))
    assert dequantised.weights_types == "bfloat16"
    assert dequantised.weights_bytes == 2 * BLOCK_MODEL.num_parameters
    with caplog.at_level(logging.INFO, "rawpaged"):
        LLM(str(path), tokenizer=tokenizer, max_model_len=64, num_threads=1).close()
    assert "as Q6_K, Q4_K, Q5_K and Q5_0" in caplog.text


def test_asleep_without_weights_and_back(tmp_path: Path, tokenizer: str) -> None:
    path = write_block_model(tmp_path / "x.gguf", k_m_types)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(path), tokenizer=tokenizer, max_model_len=64, num_threads=1) as llm:
        before = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        llm.sleep(2)
        llm.wake_up()
        after = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"quantization": "awq"}, "quantization='awq' is not one of gguf"),
        ({"quantization": 4}, "quantization=4 must be a string or None"),
        ({"quantization": "gguf", "device": "cuda"}, "is for device='cpu'"),
        ({"quantization": "gguf", "load_format": "dummy"}, "reads none; leave one out"),
    ],
)
def test_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(**flags)


def test_nothing_to_keep(tmp_path: Path, tokenizer: str) -> None:
    floats = write_gguf(tmp_path / "x.gguf", type_name="F16")
    for model in (LLAMA, str(floats)):
        with pytest.raises(ConfigError, match="holds no weights of types Q4_0, Q4_1"):
            LLM(tiny_config(model=model, tokenizer=tokenizer, quantization="gguf"))
