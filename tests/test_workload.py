"""Workloads in a few words, and their requests."""

from __future__ import annotations

import re

import pytest

from rawpaged.errors import ConfigError
from rawpaged.workload import Workload, parse_range, parse_workload


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("prompts=32", Workload(prompts=32)),
        (
            "prompts=32,prompt_len=128,output_len=64-128",
            Workload(prompts=32, prompt_len=(128, 128), output_len=(64, 128)),
        ),
        (
            " prompt_len=16-32 , shared_prefix_len=16, seed=7",
            Workload(prompt_len=(16, 32), shared_prefix_len=16, seed=7),
        ),
    ],
)
def test_parse(text: str, workload: Workload) -> None:
    assert parse_workload(text) == workload


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "''"),
        ("prompts", "''"),
        ("prompts=", "''"),
        ("prompts=0", "prompts=0"),
        ("prompts=1000000", "prompts=1000000"),
        ("prompts=1-2", "prompts=1-2 must be one number"),
        ("prompts=1,prompts=2", "prompts is given twice"),
        ("batch=3", "'batch' is not one of prompts"),
        ("prompt_len=-3", "'-3'"),
        ("prompt_len=0-3", "prompt_len=0-3"),
        ("prompt_len=8-4", "'8-4' ends before it begins"),
        ("output_len=1.5", "'1.5'"),
        ("output_len=²", "'²'"),
        ("output_len=1-2-3", "'1-2-3'"),
        ("seed=99999999999", "'99999999999'"),
        ("prompt_len=8,shared_prefix_len=9", "shared_prefix_len=9"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_workload(text)


def test_ranges() -> None:
    assert parse_range("800-810") == (800, 810)
    assert parse_range(" 800 ") == (800, 800)


def test_requests() -> None:
    workload = Workload(
        prompts=50, prompt_len=(8, 12), output_len=(3, 4), shared_prefix_len=8, seed=1
    )
    requests = workload.requests(100)
    assert requests == workload.requests(100)
    assert requests != Workload(prompts=50, prompt_len=(8, 12), seed=2).requests(100)
    assert len(requests) == 50
    assert {len(token_ids) for token_ids, _ in requests} == {8, 9, 10, 11, 12}
    assert {output_len for _, output_len in requests} == {3, 4}
    assert len({tuple(token_ids[:8]) for token_ids, _ in requests}) == 1
    assert all(0 <= token_id < 100 for token_ids, _ in requests for token_id in token_ids)
