"""64 mixed requests at once through HTTP in 40 blocks: each answer is the one it gets alone."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rawpaged import LLM, AsyncEngine, SamplingParams
from rawpaged.config import EngineConfig
from rawpaged.outputs import CompletionOutput
from rawpaged.server.metrics import PrometheusStats
from tests.server.client import Answer, send
from tests.server.conftest import serve
from tests.tiny import VOCAB_SIZE, engine_of, tiny_config, wait_until, write_tokenizer

MODEL = pytest.mark.model
NUM_REQUESTS = 64
NUM_ABORTED = 6
NUM_BLOCKS = 40
LONG = 200
"""Tokens that a client which leaves has asked for."""
WORDS = ("the", "block", "table", "says", "where", "each", "token", "of", "a", "request", "is")


@dataclass(frozen=True)
class Case:
    """One HTTP request: the prompt, the fields that are SamplingParams too, and how it is sent."""

    prompt: str | list[int]
    fields: dict[str, Any]
    stream: bool
    leaves: bool = False
    """The client goes away after a few tokens."""

    @property
    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            **self.fields,
            "stream": self.stream,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    @property
    def key(self) -> str:
        """Equal for cases that only differ in how they are sent."""
        return json.dumps([self.prompt, self.fields, self.leaves])

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.fields)


@dataclass(frozen=True)
class Choice:
    """What one sample of an answer says."""

    text: str
    token_ids: list[int]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    finish_reason: str | None
    stop_reason: int | str | None


def make_cases(rng: random.Random, *, with_token_ids: bool, longest: int) -> list[Case]:
    """Greedy and seeded, one to three samples, a third with a common prefix, some with salts.

    Each is sent as a stream and not.
    """
    shared_text = " ".join(rng.choices(WORDS, k=25))
    shared_ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(35)]
    cases = []
    for i in range(NUM_REQUESTS // 2):
        length = rng.randint(1, 30)
        prompt: str | list[int] = (shared_text if i % 3 == 0 else "") + " ".join(
            rng.choices(WORDS, k=length)
        )
        if with_token_ids and i % 2:
            ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
            prompt = (shared_ids if i % 3 == 0 else []) + ids
        fields: dict[str, Any] = {"max_tokens": rng.randint(3, longest)}
        fields |= {"temperature": 0.0} if i % 4 == 0 else {"temperature": 0.9, "seed": i}
        fields |= rng.choice([{}, {"top_p": 0.8}, {"top_k": 20}, {"frequency_penalty": 0.7}])
        fields |= rng.choice([{}, {"ignore_eos": True}, {"stop": ["e", " the"], "min_tokens": 3}])
        if i % 5 == 0:
            fields["logprobs"] = 2
        if i % 3 == 1:
            fields["n"] = rng.choice((2, 3))
        if i % 6 == 0:
            fields["cache_salt"] = rng.choice("ab")
        cases += [Case(prompt, fields, stream=False), Case(prompt, fields, stream=True)]
    rng.shuffle(cases)
    return cases


def leaving(case: Case) -> Case:
    """The same as a stream that runs for long, whose client does not wait for its end."""
    fields = {name: v for name, v in case.fields.items() if name not in ("stop", "min_tokens")}
    fields |= {"max_tokens": LONG, "ignore_eos": True}
    return replace(case, fields=fields, stream=True, leaves=True)


def solo_choice(sample: CompletionOutput) -> Choice:
    chosen = zip(sample.token_ids, sample.logprobs or [], strict=False)
    return Choice(
        sample.text,
        sample.token_ids,
        [position[token_id].logprob for token_id, position in chosen],
        [
            {f"token_id:{token_id}": entry.logprob for token_id, entry in position.items()}
            for position in sample.logprobs or []
        ],
        sample.finish_reason,
        sample.stop_reason,
    )


def choices_of(answer: Answer, *, stream: bool) -> list[Choice]:
    """An answer's choices by index, put together from a stream's chunks."""
    assert answer.status == 200, answer.body
    if stream:
        *chunks, done = answer.events
        assert done == "[DONE]"
    else:
        chunks = [answer.json]
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            before = choices.get(part["index"], Choice("", [], [], [], None, None))
            assert before.finish_reason is None
            logprobs = part["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
            choices[part["index"]] = Choice(
                before.text + part["text"],
                before.token_ids + part["token_ids"],
                before.token_logprobs + logprobs["token_logprobs"],
                before.top_logprobs + logprobs["top_logprobs"],
                part["finish_reason"],
                part["stop_reason"],
            )
    return [choices[index] for index in sorted(choices)]


def leave_early(url: str, case: Case) -> int:
    """Read a few events and hang up; the number of tokens received."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps(case.body))
    response = connection.getresponse()
    assert response.status == 200
    num_tokens = num_events = 0
    while num_events < 3:
        line = response.readline()
        assert line
        if line.startswith(b"data: "):
            num_events += 1
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            num_tokens += len(choice["token_ids"])
    response.close()
    connection.close()
    return num_tokens


def metrics(url: str) -> dict[str, float]:
    """Samples under rawpaged: names, summed over labels; histograms by their _sum and _count."""
    text = send(url, "GET", "/metrics").body.decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("rawpaged:")
            if sample.labels.get("finished_reason") == "abort":
                values["aborted"] = sample.value
            values[name] = values.get(name, 0.0) + sample.value
    return values


@dataclass(frozen=True)
class Run:
    cases: list[Case]
    expected: list[list[Choice]]
    prompt_lens: list[int]
    answers: list[list[Choice] | int]
    """Choices, or the number of tokens read by a client that left."""
    metrics: dict[str, float]
    swaps: bool


def run_alone(config: EngineConfig, cases: list[Case]) -> tuple[list[list[Choice]], list[int]]:
    """Choices and prompt lengths, one request after another in a roomy engine."""
    known: dict[str, tuple[list[Choice], int]] = {}
    with LLM(config, num_gpu_blocks_override=400, enable_prefix_caching=False) as llm:
        for case in cases:
            if case.key not in known:
                params = replace(case.params, max_tokens=1) if case.leaves else case.params
                (output,) = llm.generate(case.prompt, params, use_tqdm=False)
                choices = [solo_choice(sample) for sample in output.outputs]
                known[case.key] = (choices, len(output.prompt_token_ids))
    return [known[case.key][0] for case in cases], [known[case.key][1] for case in cases]


def run_together(
    config: EngineConfig, cases: list[Case]
) -> tuple[list[list[Choice] | int], dict[str, float]]:
    """All at once through HTTP; answers, and the metrics within a second of the last."""
    stats = PrometheusStats("tiny")

    def answer(case: Case) -> list[Choice] | int:
        if case.leaves:
            return leave_early(server.url, case)
        return choices_of(
            send(server.url, "POST", "/v1/completions", case.body), stream=case.stream
        )

    def idle() -> bool:
        values = metrics(server.url)
        names = (
            "num_requests_running",
            "num_requests_waiting",
            "kv_blocks_used",
            "cpu_cache_usage_perc",
        )
        return not any(values[name] for name in names)

    with (
        AsyncEngine(config, stats_logger=stats) as engine,
        serve(cast(Any, engine), stats=stats, served_model_names=["tiny"]) as server,
        ThreadPoolExecutor(len(cases)) as pool,
    ):
        answers = list(pool.map(answer, cases))
        wait_until(idle, 1.0)
        engine_of(engine).scheduler.check_integrity()
        return answers, metrics(server.url)


RUNS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny swapping by priority": {"preemption_mode": "swap", "scheduling_policy": "priority"},
    "smollm2 swapping": {"preemption_mode": "swap"},
}


@pytest.fixture(
    scope="module",
    params=["tiny", "tiny swapping by priority", pytest.param("smollm2 swapping", marks=MODEL)],
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = random.Random(3)
    flags: dict[str, Any] = RUNS[request.param]
    if request.param.startswith("tiny"):
        tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        config = tiny_config(tokenizer=str(tokenizer), max_model_len=512, num_threads=2)
        cases = make_cases(rng, with_token_ids=True, longest=60)
    else:
        config = EngineConfig(model="smollm2-135m", max_model_len=512)
        cases = make_cases(rng, with_token_ids=False, longest=16)
    for index in rng.sample(range(NUM_REQUESTS), NUM_ABORTED):
        cases[index] = leaving(cases[index])
    expected, prompt_lens = run_alone(config, cases)
    if flags.get("scheduling_policy") == "priority":
        cases = [replace(c, fields={**c.fields, "priority": rng.randint(-1, 1)}) for c in cases]
    swap_space = 0.05 if flags else 0
    small = replace(config, num_gpu_blocks_override=NUM_BLOCKS, swap_space=swap_space, **flags)
    answers, values = run_together(small, cases)
    return Run(cases, expected, prompt_lens, answers, values, swaps=bool(flags))


def test_answers_are_those_of_solo_runs(ran: Run) -> None:
    """Token ids, text, log-probabilities to the last bit, and reasons."""
    assert ran.metrics["num_preemptions_total"] > 0
    assert (ran.metrics["swapped_in_blocks_total"] > 0) == ran.swaps
    assert ran.metrics["kv_forks_total"] > 0
    assert ran.metrics["kv_block_copies_total"] > 0
    for case, expected, answer in zip(ran.cases, ran.expected, ran.answers, strict=True):
        if not case.leaves:
            assert answer == expected, case


def test_the_cases_are_mixed(ran: Run) -> None:
    choices = [choice for expected in ran.expected for choice in expected]
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    assert {type(choice.stop_reason) for choice in choices} == {str, type(None)}
    assert {len(expected) for expected in ran.expected} == {1, 2, 3}
    assert {case.stream for case in ran.cases} == {True, False}
    assert sum(choice.top_logprobs != [] for choice in choices) > 5
    assert ran.metrics["prefix_cache_hits_total"] > 0


def test_samples_by_reason(ran: Run) -> None:
    num_samples = sum(case.params.n for case in ran.cases)
    assert ran.metrics["request_success_total"] == num_samples
    assert ran.metrics["aborted"] == sum(case.params.n for case in ran.cases if case.leaves)
    assert ran.metrics["e2e_request_latency_seconds_count"] == num_samples


def test_prompt_tokens(ran: Run) -> None:
    """Every sample has its prompt, which was found in the cache or computed, at least once."""
    expected = sum(
        length * case.params.n for length, case in zip(ran.prompt_lens, ran.cases, strict=True)
    )
    assert ran.metrics["request_prompt_tokens_sum"] == expected
    found = ran.metrics["prefix_cache_hits_total"]
    assert ran.metrics["prompt_tokens_total"] >= ran.metrics["prefix_cache_queries_total"] - found


def test_generation_tokens(ran: Run) -> None:
    """Those of the answers, and those of clients that left, which have seen the first of them."""
    answered = sum(
        len(choice.token_ids)
        for answer in ran.answers
        if isinstance(answer, list)
        for choice in answer
    )
    seen = sum(answer for answer in ran.answers if isinstance(answer, int))
    assert ran.metrics["generation_tokens_total"] == ran.metrics["request_generation_tokens_sum"]
    assert ran.metrics["generation_tokens_total"] >= answered + seen
    most = answered + LONG * ran.metrics["aborted"]
    assert ran.metrics["generation_tokens_total"] < most


def test_nothing_is_left(ran: Run) -> None:
    values = ran.metrics
    assert values["kv_blocks"] == NUM_BLOCKS
    assert values["kv_blocks_used"] == 0
    assert values["kv_blocks_free"] + values["kv_blocks_cached"] == NUM_BLOCKS
    assert values["cpu_cache_usage_perc"] == values["num_requests_swapped"] == 0
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0
    assert values["kv_cache_usage_perc"] == 0
