"""Beam searches and n=3 samples at once through HTTP in a small pool: each as it is alone.

Some clients go away while theirs are searched. Afterwards nothing is left in the pool.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from rawpaged import LLM, AsyncEngine, SamplingParams
from rawpaged.config import EngineConfig
from rawpaged.server.metrics import PrometheusStats
from tests.e2e.test_preemption_over_http import metrics
from tests.server.client import send
from tests.server.conftest import serve
from tests.tiny import VOCAB_SIZE, engine_of, tiny_config, wait_until, write_tokenizer

NUM_CASES = 24
NUM_BLOCKS = 25
"""The largest search may need 23."""
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"length_penalty": 0.0, "early_stopping": True},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0, "include_stop_str_in_output": True},
)

Sample = tuple[str, list[int], str | None, int | str | None, float | None, float | None]
"""Text, token ids, reasons, cumulative_logprob and beam_score."""


@dataclass(frozen=True)
class Case:
    """One request, not streamed; `leaves`: the client goes away after so many seconds."""

    prompt: list[int]
    fields: Mapping[str, Any]
    leaves: float | None = None


def make_cases(rng: random.Random) -> list[Case]:
    """A search of width 2 to 6 or three samples each, half of them with a common prefix."""
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(37)]
    cases = []
    for i in range(NUM_CASES):
        prompt = shared * (i % 4 < 2) + [
            rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 25))
        ]
        fields: dict[str, Any] = {"max_tokens": rng.randint(5, 30)}
        if i % 2:
            fields |= {"n": 3, "temperature": 0.9, "seed": i}
        else:
            stops = rng.sample(range(VOCAB_SIZE), 12)
            fields |= {"use_beam_search": True, "n": rng.choice((2, 3, 4, 6))}
            fields |= {"stop_token_ids": stops, "min_tokens": rng.choice((0, 3))}
            fields |= RULES[i // 2 % len(RULES)]
        cases.append(Case(prompt, fields))
        if i % 4 == 0:
            long = {"use_beam_search": True, "n": 2, "max_tokens": 150, "ignore_eos": True}
            cases.append(Case(prompt[-30:], long, leaves=0.2 * rng.random()))
    return cases


def run_alone(config: EngineConfig, cases: list[Case]) -> list[list[Sample]]:
    """What each says in a roomy engine, one after another."""
    results: list[list[Sample]] = []
    with LLM(config, num_gpu_blocks_override=400, enable_prefix_caching=False) as llm:
        for case in cases:
            if case.leaves is not None:
                results.append([])
                continue
            (output,) = llm.generate([case.prompt], SamplingParams(**case.fields), use_tqdm=False)
            results.append(
                [
                    (
                        sample.text,
                        sample.token_ids,
                        sample.finish_reason,
                        sample.stop_reason,
                        sample.cumulative_logprob,
                        sample.beam_score,
                    )
                    for sample in output.outputs
                ]
            )
    return results


def ask(url: str, case: Case) -> list[Sample]:
    """The choices that a server sends; none if the client leaves."""
    body = {"prompt": case.prompt, **case.fields, "return_token_ids": True}
    if case.leaves is not None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        connection.request("POST", "/v1/completions", json.dumps(body))
        time.sleep(case.leaves)
        connection.close()
        return []
    answer = send(url, "POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    return [
        (
            choice["text"],
            choice["token_ids"],
            choice["finish_reason"],
            choice["stop_reason"],
            choice.get("cumulative_logprob"),
            choice.get("beam_score"),
        )
        for choice in answer.json["choices"]
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"max_num_batched_tokens": 17},
        {"preemption_mode": "swap", "swap_space": 0.01},
        {"preemption_mode": "swap", "swap_space": 0.0001},
    ],
    ids=["roomy steps", "narrow steps", "swap", "swap a few"],
)
def test_searches_in_company(
    tmp_path_factory: pytest.TempPathFactory, flags: dict[str, Any]
) -> None:
    """Preempted to be computed again or swapped, as far as there is room on the host."""
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    config = tiny_config(tokenizer=str(tokenizer))
    cases = make_cases(random.Random(7))
    expected = run_alone(config, cases)
    small = tiny_config(tokenizer=str(tokenizer), num_gpu_blocks_override=NUM_BLOCKS, **flags)
    stats = PrometheusStats("tiny")

    def idle() -> bool:
        values = metrics(server.url)
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        return not any(values[name] for name in names)

    with (
        AsyncEngine(small, stats_logger=stats) as engine,
        serve(cast(Any, engine), stats=stats, served_model_names=["tiny"]) as server,
        ThreadPoolExecutor(len(cases)) as pool,
    ):
        answers = list(pool.map(lambda case: ask(server.url, case), cases))
        wait_until(idle, 5.0)
        scheduler = engine_of(engine).scheduler
        scheduler.check_integrity()
        values = metrics(server.url)
    for case, alone, answer in zip(cases, expected, answers, strict=True):
        assert answer == alone, case
    assert {sample[2] for alone in expected for sample in alone} == {"stop", "length"}
    assert values["num_preemptions_total"] > 0
    assert (values["num_swap_preemptions_total"] > 0) == ("swap_space" in flags)
    assert values["prefix_cache_hits_total"] > 0
    assert scheduler.kv_cache_manager.num_block_copies > 0
    assert values["kv_blocks_free"] + values["kv_blocks_cached"] == NUM_BLOCKS
    assert values["cpu_cache_usage_perc"] == values["num_requests_swapped"] == 0
    assert scheduler.swap_space.block_pool.num_used_blocks == 0
