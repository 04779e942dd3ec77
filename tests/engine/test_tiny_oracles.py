"""Tiny checkpoints of each architecture against what transformers computed in float32."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.helpers import LLAMA_FAMILY, golden, recorded_logits, request, run, tiny_engine


@pytest.mark.parametrize("name", LLAMA_FAMILY)
def test_logits_at_every_position(name: str) -> None:
    """Position by position, as prompts of every length that share their prefix."""
    expected = golden(name)
    ids = expected["input_ids"].tolist()
    engine = tiny_engine(name, num_blocks=600)
    lengths = range(1, len(ids) + 1)
    run(engine, [request(str(n), ids[:n], max_tokens=1) for n in lengths])
    logits = recorded_logits(engine)
    got = np.stack([np.frombuffer(logits[str(n)][0], np.float32) for n in lengths])
    np.testing.assert_allclose(got, expected["logits"], rtol=0, atol=2e-4)
    engine.close()


@pytest.mark.parametrize("name", LLAMA_FAMILY)
def test_greedy_ids(name: str) -> None:
    expected = golden(name)
    prompt = expected["input_ids"][: int(expected["greedy_prompt_len"])].tolist()
    engine = tiny_engine(name)
    tokens = run(engine, [request("a", prompt, max_tokens=len(expected["greedy_ids"]))])
    assert tokens["a"] == expected["greedy_ids"].tolist()
    engine.close()


def test_bfloat16_is_near_float32() -> None:
    """Weights and KV rounded to bfloat16 move logits by about as much as they were rounded."""
    expected = golden("llama")
    ids = expected["input_ids"].tolist()
    engine = tiny_engine("llama", dtype="bfloat16")
    run(engine, [request("a", ids, max_tokens=1)])
    row = np.frombuffer(recorded_logits(engine)["a"][0], np.float32)
    error = np.abs(row - expected["logits"][-1]).max() / expected["logits"][-1].std()
    assert 1e-4 < error < 0.05
    engine.close()
