"""A tokenizer for the tiny Llama checkpoint, and small engines over both."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rawpaged import LLM, AsyncEngine
from rawpaged.config import EngineConfig
from rawpaged.engine.engine import Engine
from rawpaged.engine.stats import EngineLimits, RequestStats, StepStats

LLAMA = str(Path(__file__).parent / "golden" / "tiny" / "llama")
VOCAB_SIZE = 320
EOS = 2
"""The checkpoint's end-of-sequence token."""

CORPUS = ["the other three teeth gather there", "naïve café, Größe", "日本語の本", "😀 😀😁"]


def write_tokenizer(directory: Path) -> Path:
    """A byte-level tokenizer of exactly the checkpoint's vocabulary; many tokens are half
    characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_config(**flags: Any) -> EngineConfig:
    """A small engine on one thread; `flags` go before what is set here."""
    return EngineConfig(
        **{
            "model": LLAMA,
            "num_threads": 1,
            "num_gpu_blocks_override": 128,
            "max_model_len": 256,
            "max_num_batched_tokens": 64,
            "max_logprobs": VOCAB_SIZE,
            **flags,
        }
    )


def engine_of(owner: LLM | AsyncEngine) -> Engine:
    """The engine behind, to look at or to break."""
    return owner._thread._engine


class Records:
    """A StatsLogger that keeps everything."""

    def __init__(self) -> None:
        self.limits: list[EngineLimits] = []
        self.steps: list[StepStats] = []
        self.requests: list[RequestStats] = []
        self.first_tokens: list[float] = []
        self.inter_token_latencies: list[float] = []

    def record_start(self, limits: EngineLimits) -> None:
        self.limits.append(limits)

    def record_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def record_first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def record_inter_token_latency(self, seconds: float) -> None:
        self.inter_token_latencies.append(seconds)

    def record_request(self, stats: RequestStats) -> None:
        self.requests.append(stats)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        last = self.steps[-1]
        return last.num_running == last.num_waiting == last.kv.num_used_blocks == 0


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Fails if the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.002)
