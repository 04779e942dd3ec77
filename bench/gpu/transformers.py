"""Decode steps of the same model by transformers, where that and torch are installed."""

from __future__ import annotations

import importlib
import time
from functools import partial
from typing import Any

import numpy as np

from bench.gpu.peers import import_torch
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target

_STEPS = 20


def time_transformers(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Each batch at the context of our own steps, weights random."""
    torch = None if target.is_simulated else import_torch()
    if torch is None:
        recorder.skip("transformers", "torch with CUDA is not installed")
        return
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        recorder.skip("transformers", "transformers is not installed")
        return
    models: list[Any] = []
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    load = partial(_load, torch, transformers, sizes)
    recorder.check("transformers/load", versions, lambda: models.append(load()))
    for model in models:
        for batch in sizes.step_batches:
            parameters = {"batch": batch, "context": sizes.step_context, "dtype": "bfloat16"}
            run = partial(_measure, torch, model, batch, sizes)
            recorder.measure("transformers/decode", parameters | versions, run)


def _load(torch: Any, transformers: Any, sizes: Sizes) -> Any:
    shape = sizes.model
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _measure(torch: Any, model: Any, batch: int, sizes: Sizes) -> Results:
    """Greedy steps after a prompt: its last token is the first of them."""
    prompt = torch.ones((batch, sizes.step_context - 1), dtype=torch.long, device="cuda")
    token = torch.ones((batch, 1), dtype=torch.long, device="cuda")
    with torch.inference_mode():
        cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        durations = []
        for _ in range(_STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = out.logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            durations.append(time.perf_counter() - started)
    median = float(np.median(durations[_STEPS // 4 :]))
    return {"execute_ms": 1e3 * median, "tokens_per_s": batch / median}
