"""The least time of a case, against sums over its steps and tokens one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.limits import ModelWork, least_seconds, work_of_model
from bench.presets import PRESETS, ServeCase
from bench.probes import Peaks
from tests.tiny import LLAMA

WORK = ModelWork(
    weight_bytes=1000,
    kv_bytes_per_token=8,
    layer_flops=600,
    head_flops=90,
    num_heads=2,
    head_dim=4,
    num_layers=3,
    weights_type="float32",
    kv_type="float32",
)


def attention(first: int, last: int) -> int:
    """Of tokens [first, last): scores and weighted values of each key that each sees."""
    return sum(3 * 2 * (2 * 4 + 2 * 4) * (token + 1) for token in range(first, last))


def case(**changes: int) -> ServeCase:
    made = ServeCase(name="x", num_requests=6, concurrency=3, prompt_len=10, output_len=5)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_reading_is_what_takes_long() -> None:
    peaks = Peaks(100.0, {"multiply_add": 1e6})
    prompts = (6 * 10 * 600 + 6 * 90 + 6 * attention(0, 10)) / 1e6
    # Two lots of three requests, four steps each, with 12 tokens of context on average.
    steps = 2 * 4 * (1000 + 3 * 12 * 8) / 100
    assert least_seconds(WORK, case(), peaks) == pytest.approx(prompts + steps)


def test_computing_is_what_takes_long() -> None:
    peaks = Peaks(1e9, {"multiply_add": 50.0})
    prompts = 6 * 10 * 600 + 6 * 90 + 6 * attention(0, 10)
    steps = 2 * 4 * 3 * (600 + 90 + attention(11, 12))
    assert least_seconds(WORK, case(), peaks) == pytest.approx((prompts + steps) / 50)


def test_a_shared_prefix_is_computed_once() -> None:
    peaks = Peaks(1e30, {"multiply_add": 1.0})
    shared = case(shared_prefix_len=8, output_len=1)
    tokens = 8 + 6 * 2
    expected = tokens * 600 + 6 * 90 + attention(0, 8) + 6 * attention(8, 10)
    assert least_seconds(WORK, shared, peaks) == pytest.approx(expected)


def test_fewer_requests_than_places() -> None:
    peaks = Peaks(1.0, {"multiply_add": 1e30})
    expected = 4 * (1000 + 2 * 12 * 8)
    assert least_seconds(WORK, case(num_requests=2), peaks) == pytest.approx(expected)


def test_arrivals_by_the_clock_have_no_least_time() -> None:
    by_clock = replace(PRESETS["a"], concurrency=None, request_rate=2.0)
    with pytest.raises(ValueError, match="case a has no concurrency"):
        least_seconds(WORK, by_clock, Peaks(1.0, {"multiply_add": 1.0}))


def test_work_of_a_model() -> None:
    work = work_of_model(LLAMA, "float32")
    assert work.weights_type == work.kv_type == "float32"
    assert work_of_model(LLAMA, "bfloat16").weight_bytes * 2 == work.weight_bytes
    # All matrices are read once and multiplied once; norms are the rest.
    matrices = 4 * (work.layer_flops + work.head_flops) // 2
    assert matrices <= work.weight_bytes < 1.02 * matrices
