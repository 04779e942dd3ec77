"""The client against a server whose timetable is known."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.load import RequestRecord, Target, first_model, run_load
from bench.serve import summarize
from tests.bench.fake_server import FakeServer, running


def record(started: float, chunks: Sequence[float], ended: float) -> RequestRecord:
    """A request of 3 prompt tokens and two output tokens a chunk."""
    return RequestRecord(
        started,
        ended,
        list(chunks),
        prompt_tokens=3,
        completion_tokens=2 * len(chunks),
        cached_tokens=1,
    )


def load(
    server: FakeServer,
    *,
    requests: int = 1,
    output_len: int = 6,
    concurrency: int | None = 1,
    arrivals: Sequence[float] | None = None,
) -> tuple[list[RequestRecord], float]:
    return asyncio.run(
        run_load(
            Target(server.url, "fake"),
            [[i, 7, 9] for i in range(requests)],
            output_len=output_len,
            concurrency=concurrency,
            arrivals=arrivals or [0.0] * requests,
        )
    )


def test_latencies_and_rates_by_their_definitions() -> None:
    records = [record(1.0, [1.5, 1.6, 1.9], 2.0), record(2.0, [2.1, 2.3], 2.5)]
    results = summarize(records, 4.0, 6)
    assert results["ttft_ms"]["mean"] == pytest.approx(300)
    assert results["ttft_ms"]["p50"] == pytest.approx(300)
    assert results["ttft_ms"]["p90"] == pytest.approx(460)
    assert results["itl_ms"]["mean"] == pytest.approx(200)
    assert results["itl_ms"]["p99"] == pytest.approx(298)
    # (1.9 - 1.5) / 5 and (2.3 - 2.1) / 3
    assert results["tpot_ms"]["mean"] == pytest.approx((80 + 200 / 3) / 2)
    assert results["e2e_ms"]["mean"] == pytest.approx(750)
    assert results["requests_per_s"] == 0.5
    assert results["output_tokens_per_s"] == 2.5
    assert results["total_tokens_per_s"] == 4.0
    assert results["cached_tokens"] == 2
    assert results["short_requests"] == 1


def test_times_follow_those_of_the_server() -> None:
    with running(FakeServer(first_delay=0.2, gap=0.03)) as server:
        [record], duration = load(server, output_len=5)
    assert record.error is None
    assert record.ttft >= 0.2
    assert len(record.chunk_times) == len(server.sent) == 5
    for arrived, sent in zip(record.chunk_times, server.sent, strict=True):
        assert arrived >= sent
    assert record.chunk_times == sorted(record.chunk_times)
    assert sum(record.gaps) == pytest.approx(record.chunk_times[-1] - record.chunk_times[0])
    assert record.chunk_times[-1] <= record.ended
    assert record.latency <= duration


def test_tokens_are_counted_by_the_server_and_not_by_chunks() -> None:
    with running(FakeServer(gap=0.05, tokens_per_chunk=3)) as server:
        [record], duration = load(server, output_len=9)
    assert len(record.chunk_times) == 3
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (3, 9, 3)
    span = record.chunk_times[-1] - record.chunk_times[0]
    assert record.tpot == pytest.approx(span / 8)
    assert summarize([record], duration, 9)["output_tokens"] == 9


def test_a_chunk_that_only_says_the_end_is_no_token() -> None:
    with running(FakeServer(closing_chunk=True)) as server:
        [record], _ = load(server, output_len=4)
    assert record.error is None
    assert len(record.chunk_times) == 4


@pytest.mark.parametrize("output_len", [1, 4])
def test_a_token_without_text_of_its_own_counts(output_len: int) -> None:
    with running(FakeServer(empty_text=True)) as server:
        [record], _ = load(server, output_len=output_len)
    assert record.error is None
    assert record.chunk_times
    assert (record.tpot is None) == (output_len == 1)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("status", "HTTP 500"),
        ("error", "error in the stream"),
        ("cut", r"without \[DONE\]"),
        ("unfinished", "without a finish_reason"),
        ("usage", "no usage"),
    ],
)
def test_failures_are_counted_and_left_out_of_rates(failure: str, message: str) -> None:
    with running(FakeServer(failures={1: failure})) as server:
        records, duration = load(server, requests=3)
    assert [record.error is None for record in records] == [True, False, True]
    results = summarize(records, duration, 6)
    assert (results["requests"], results["errors"]) == (3, 1)
    assert re.search(message, str(records[1].error))
    assert results["error_messages"] == [records[1].error]
    assert results["output_tokens"] == 12
    assert results["requests_per_s"] == pytest.approx(2 / duration)


def test_a_server_that_is_not_there() -> None:
    server = FakeServer()
    with running(server):
        pass
    records, duration = load(server, requests=2)
    results = summarize(records, duration, 6)
    assert results["errors"] == 2
    assert results["output_tokens_per_s"] == 0
    assert results["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert "ClientConnectorError" in str(records[0].error)


def test_a_request_that_takes_too_long() -> None:
    with running(FakeServer(wait_for=2)) as server:
        target = Target(server.url, "fake", timeout=0.1)
        [record], _ = asyncio.run(
            run_load(target, [[1]], output_len=1, concurrency=1, arrivals=[0.0])
        )
    assert "Timeout" in str(record.error)


def test_answers_shorter_than_asked_for_are_counted() -> None:
    with running(FakeServer(output_tokens=2)) as server:
        records, duration = load(server, requests=2)
    assert summarize(records, duration, 6)["short_requests"] == 2
    assert summarize(records, duration, 2)["short_requests"] == 0


def test_as_many_requests_under_way_as_asked_for_and_no_more() -> None:
    with running(FakeServer(wait_for=3)) as server:
        load(server, requests=12, output_len=1, concurrency=3)
    assert server.most_under_way == 3
    assert len(server.bodies) == 12


def test_an_open_loop_waits_for_its_times_and_not_for_answers() -> None:
    arrivals = [0.0, 0.05, 0.1]
    with running(FakeServer(wait_for=3)) as server:
        before = time.perf_counter()
        records, _ = load(server, requests=3, concurrency=None, arrivals=arrivals)
    assert [record.error for record in records] == [None] * 3
    for record, arrival in zip(records, arrivals, strict=True):
        assert record.started >= before + arrival


def test_requests_ask_for_exactly_so_many_tokens_greedily() -> None:
    with running(FakeServer()) as server:
        target = replace(Target(server.url, "m"), api_key="sesame")
        asyncio.run(run_load(target, ["a b"], output_len=3, concurrency=1, arrivals=[0.0]))
        assert asyncio.run(first_model(target)) == "fake"
    assert server.bodies == [
        {
            "model": "m",
            "prompt": "a b",
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer sesame"
