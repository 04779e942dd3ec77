"""The built-in model's tokenizer against what transformers makes of the same file."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rawpaged.tokenization.gguf_tokenizer import load_tokenizer_from_gguf
from rawpaged.tokenization.tokenizer import Tokenizer

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-135m.json"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def smollm2(smollm2_checkpoint: Any) -> Tokenizer:
    return load_tokenizer_from_gguf(smollm2_checkpoint.gguf_metadata)


def test_sizes_and_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_tokens.pad_token == "<|im_end|>"


def test_prompts_are_encoded_as_transformers_does(
    smollm2: Tokenizer, golden: dict[str, Any]
) -> None:
    for case in golden["completions"]:
        assert smollm2.encode(case["prompt"]) == case["prompt_ids"]
        assert smollm2.decode(case["prompt_ids"]) == case["prompt"]


def test_chats_are_rendered_as_transformers_does(
    smollm2: Tokenizer, golden: dict[str, Any]
) -> None:
    for case in golden["chats"]:
        assert smollm2.apply_chat_template(case["messages"]) == case["rendered"]
        assert smollm2.encode_chat(case["messages"]) == case["prompt_ids"]


def test_outputs_are_decoded_as_transformers_does(
    smollm2: Tokenizer, golden: dict[str, Any]
) -> None:
    for case in golden["completions"] + golden["chats"]:
        detokenizer = smollm2.incremental(
            skip_special_tokens=False, prompt_token_ids=case["prompt_ids"]
        )
        streamed = "".join([*map(detokenizer.append, case["greedy"]), detokenizer.finish()])
        assert streamed == case["greedy_text"]
        assert smollm2.decode(case["greedy"], skip_special_tokens=False) == case["greedy_text"]


def test_random_tokens_stream_as_the_library_decodes_them(smollm2: Tokenizer) -> None:
    source = random.Random(0)
    part_bytes = [
        token_id
        for token_id in range(smollm2.vocab_size)
        if "\ufffd" in smollm2.token_text(token_id)
    ]
    assert len(part_bytes) > 100
    for number in range(1000):
        ids = source.choices(part_bytes if number % 2 else range(smollm2.vocab_size), k=40)
        for skip in (True, False):
            detokenizer = smollm2.incremental(skip_special_tokens=skip)
            streamed = "".join([*map(detokenizer.append, ids), detokenizer.finish()])
            assert streamed == smollm2._backend.decode(ids, skip_special_tokens=skip)


def test_a_token_costs_microseconds(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The quick brown fox, 日本語 and 👨‍👩‍👧. " * 300)
    detokenizer = smollm2.incremental(skip_special_tokens=True)
    start = time.perf_counter()
    for token_id in ids:
        detokenizer.append(token_id)
    # About 0.5 us on an idle core; the margin is for busy machines.
    assert (time.perf_counter() - start) / len(ids) < 30e-6
