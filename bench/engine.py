"""`bench engine`: the engine in this process, without HTTP, to tell the server's share apart."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import LoadMeter, busy_share, usable_cores
from bench.quiet import check_quiet
from bench.rows import Origin, append_row, format_table, make_row
from bench.summary import median_results
from rawpaged import LLM, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineCase:
    """A batch of requests that are submitted together."""

    name: str
    batch_size: int
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `bench engine` was asked for."""

    model: str
    cases: Sequence[EngineCase]
    dtype: str = "auto"
    num_threads: int | None = None
    load_format: str = "auto"
    max_num_batched_tokens: int = 512
    repeat: int = 1
    seed: int | None = None
    require_quiet: bool = False
    output: Path | None = None


def default_cases(
    batch_sizes: Sequence[int], prompt_len: int, output_len: int, prefill_len: int
) -> list[EngineCase]:
    """Generation at each batch size, and one long prompt with a single token of output."""
    cases = [EngineCase(f"batch-{size}", size, prompt_len, output_len) for size in batch_sizes]
    return [*cases, EngineCase("prefill", 1, prefill_len, 1)]


def run_engine(options: EngineOptions, origin: Origin) -> int:
    """Measure each case, append a row for each, print them; returns 0."""
    # A prompt that an earlier repetition had would come from the prefix cache.
    if options.seed is None:
        options = replace(options, seed=secrets.randbits(32))
    rng = np.random.default_rng(options.seed)
    rows = []
    started = time.perf_counter()
    with LLM(
        options.model,
        dtype=options.dtype,
        num_threads=options.num_threads,
        load_format=options.load_format,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=max(64, *(case.batch_size for case in options.cases)),
    ) as llm:
        ready_seconds = time.perf_counter() - started
        for case in options.cases:
            row = _measure(llm, case, options, origin, rng, ready_seconds)
            append_row(options.output, row)
            rows.append(row)
    print(results_table(rows))
    return 0


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a case: medians over its repetitions."""
    names = ("duration_s", "prompt_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
    headers = ["case", "batch", "prompt", "output", "seconds", "prompt tok/s", "out tok/s", "tok/s"]
    lines = []
    for row in rows:
        parameters = row["parameters"]
        shape = [parameters[name] for name in ("batch_size", "prompt_len", "output_len")]
        lines.append([row["case"], *shape, *(row["results"][name] for name in names)])
    return format_table(headers, lines)


def _measure(
    llm: LLM,
    case: EngineCase,
    options: EngineOptions,
    origin: Origin,
    rng: np.random.Generator,
    ready_seconds: float,
) -> dict[str, Any]:
    _run_once(llm, EngineCase("warm-up", case.batch_size, 16, 2), rng)
    load_before = check_quiet(busy_share(), require=options.require_quiet)
    meter = LoadMeter()
    runs = [_run_once(llm, case, rng) for _ in range(options.repeat)]
    parameters = {
        **asdict(case),
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.num_threads or usable_cores(),
        "load_format": options.load_format,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "repeat": options.repeat,
        "seed": options.seed,
    }
    return make_row(
        origin,
        benchmark="engine",
        case=str(parameters.pop("name")),
        parameters=parameters,
        results=median_results(runs),
        runs=runs,
        engine_ready_seconds=ready_seconds,
        load_before=load_before,
        other_cores=meter.other_cores(),
    )


def _run_once(llm: LLM, case: EngineCase, rng: np.random.Generator) -> dict[str, Any]:
    """All requests of the case at once; raises if a request got less than was asked for."""
    vocab_size = llm.model_config.vocab_size
    prompts = rng.integers(0, vocab_size, (case.batch_size, case.prompt_len)).tolist()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=case.output_len)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    duration = time.perf_counter() - started
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert output_tokens == case.batch_size * case.output_len, output_tokens
    return {
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "prompt_tokens_per_s": prompt_tokens / duration,
        "output_tokens_per_s": output_tokens / duration,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration,
    }
