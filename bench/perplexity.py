"""`bench perplexity`: what a type of weights or of KV cache costs in quality, on a fixed text.

The text is cut into windows of equal length, each a prompt of its own. The model is asked for the
log-probability of every token in it, so what is measured is prefill through the paged cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.rows import Origin, append_row, format_table, make_row
from rawpaged import LLM, SamplingParams
from rawpaged.config import EngineConfig
from rawpaged.errors import InvalidRequestError

DEFAULT_TEXT = Path(__file__).parent / "texts" / "alice.txt"
"""The opening of Alice's Adventures in Wonderland (1865), in the public domain."""

_CHUNK = 64
"""Tokens whose logits are in memory at once, through max_num_seqs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityOptions:
    """What `bench perplexity` was asked for; the first variant is the reference."""

    model: str
    variants: Sequence[str]
    """Fields of EngineConfig that are words, as in "dtype=bfloat16,kv_cache_dtype=int8"."""
    text: Path = DEFAULT_TEXT
    window: int = 512
    """Tokens of a prompt."""
    num_threads: int | None = None
    output: Path | None = None


def run_perplexity(options: PerplexityOptions, origin: Origin) -> int:
    """A row for each variant; returns 0. Raises ValueError for what is no variant or window."""
    if options.window < 2:
        raise ValueError(f"--window {options.window} must be at least 2")
    fields = [engine_fields(variant) for variant in options.variants]
    rows: list[dict[str, Any]] = []
    reference: npt.NDArray[np.float64] | None = None
    for variant, own in zip(options.variants, fields, strict=True):
        started = time.perf_counter()
        logprobs = text_logprobs(options, own)
        seconds = time.perf_counter() - started
        if reference is None:
            reference = logprobs
        row = make_row(
            origin,
            benchmark="perplexity",
            case=variant,
            parameters={
                "model": options.model,
                "text": options.text.name,
                "window": options.window,
                "reference": options.variants[0],
                "threads": options.num_threads,
            },
            results={**compared(logprobs, reference), "seconds": seconds},
            load_before=None,
            other_cores=None,
        )
        append_row(options.output, row)
        rows.append(row)
    print(results_table(rows))
    return 0


def engine_fields(variant: str) -> dict[str, str]:
    """{"dtype": "bfloat16"} of "dtype=bfloat16"; raises ValueError for anything else."""
    fields = {}
    for part in variant.split(","):
        name, equals, value = part.partition("=")
        if not equals or name == "model" or name not in EngineConfig.__dataclass_fields__:
            raise ValueError(
                f"variant {variant!r}: {part!r} is not NAME=VALUE with a field of EngineConfig "
                "(--model says which model)"
            )
        fields[name] = value
    return fields


def text_logprobs(options: PerplexityOptions, fields: dict[str, str]) -> npt.NDArray[np.float64]:
    """Log-probability of each token of the text but the first of each window."""
    text = options.text.read_text(encoding="utf-8")
    config: dict[str, Any] = {
        "max_model_len": options.window + 1,
        "max_num_seqs": _CHUNK,
        "num_threads": options.num_threads,
        **fields,
    }
    with LLM(options.model, **config) as llm:
        if llm.tokenizer is None:
            raise InvalidRequestError(f"{options.model} has no tokenizer for the text", "model")
        token_ids = llm.tokenizer.encode(text)
        if len(token_ids) < 2:
            raise ValueError(f"--text {options.text} has no second token to ask for")
        windows = [
            token_ids[first : first + options.window]
            for first in range(0, len(token_ids) - 1, options.window)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(windows, params, use_tqdm=False)
    logprobs = []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            logprobs.append(entry[token_id].logprob)
    return np.array(logprobs)


def compared(
    logprobs: npt.NDArray[np.float64], reference: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """Perplexity, its ratio to the reference's, and how far single log-probabilities are apart."""
    difference = np.abs(logprobs - reference)
    return {
        "tokens": len(logprobs),
        "perplexity": math.exp(-logprobs.mean()),
        "perplexity_ratio": math.exp(reference.mean() - logprobs.mean()),
        "mean_logprob_error": float(difference.mean()),
        "max_logprob_error": float(difference.max()),
    }


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a variant."""
    names = ("tokens", "perplexity", "mean_logprob_error", "max_logprob_error", "seconds")
    headers = ["variant", "tokens", "perplexity", "|d logprob|", "max", "seconds", "change"]
    lines = []
    for row in rows:
        change = f"{100 * (row['results']['perplexity_ratio'] - 1):+.3f} %"
        lines.append([row["case"], *(row["results"][name] for name in names), change])
    return format_table(headers, lines)
