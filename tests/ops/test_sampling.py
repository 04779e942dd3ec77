"""Sampling ops: the kept set against sorting, the draw's distribution, edits, logprobs, Philox."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import Backend, LogitEdits, SamplingRows
from rawpaged.cpu.philox import philox4x32
from tests import reference


@pytest.fixture
def dtype() -> str:
    """Logits are float32 whatever the weights are."""
    return "float32"


def rows(n: int, **given: Any) -> SamplingRows:
    """n rows with the same parameters, and a position each."""
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 7,
        "sample_index": 0,
    }
    values = {**defaults, **given}
    return SamplingRows(
        temperature=np.full(n, values["temperature"], np.float32),
        top_k=np.full(n, values["top_k"], np.int32),
        top_p=np.full(n, values["top_p"], np.float32),
        min_p=np.full(n, values["min_p"], np.float32),
        seeds=np.full(n, values["seed"], np.uint64),
        positions=np.arange(n, dtype=np.uint32),
        sample_indices=np.full(n, values["sample_index"], np.uint32),
    )


def repeat(row: npt.NDArray[np.float32], n: int) -> npt.NDArray[np.float32]:
    return np.repeat(row[None], n, axis=0)


def test_greedy_takes_the_lowest_of_equals(backend: Backend) -> None:
    logits = np.array([[0, 3, 3, 1], [5, 5, 5, 5], [-9, -np.inf, -8, -8]], np.float32)
    assert backend.sample(logits, rows(3, temperature=0.0)).tolist() == [1, 0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_to_choose_from(backend: Backend, temperature: float) -> None:
    logits = np.array([[np.nan] * 4, [-np.inf] * 4, [0, 1, 2, 3]], np.float32)
    sampled = backend.sample(logits, rows(3, temperature=temperature))
    assert sampled[:2].tolist() == [-1, -1]
    assert sampled[2] in range(4)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10_000},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8},
    ],
    ids=str,
)
def test_exactly_the_kept_tokens_are_drawn(backend: Backend, params: dict[str, float]) -> None:
    logits = (2 * np.random.default_rng(0).standard_normal(50)).astype(np.float32)
    given: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    kept = reference.kept_tokens(logits, **given)
    draws = 20_000
    sampled = backend.sample(repeat(logits, draws), rows(draws, **params))
    counts = np.bincount(sampled, minlength=50)
    assert not counts[~kept].any()
    expected = np.where(kept, np.exp(reference.log_softmax(logits / given["temperature"])), 0)
    expected *= draws / expected.sum()
    # Five standard deviations of a binomial count.
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 5).all()


def test_ties_at_the_threshold_are_all_kept(backend: Backend) -> None:
    logits = np.array([3, 1, 1, 1, 0, 0], np.float32)
    sampled = backend.sample(repeat(logits, 3000), rows(3000, top_k=2))
    assert set(sampled.tolist()) == {0, 1, 2, 3}


def test_a_draw_depends_on_seed_position_and_sample_alone(backend: Backend) -> None:
    logits = np.random.default_rng(1).standard_normal((40, 300)).astype(np.float32)
    together = backend.sample(logits, rows(40, top_p=0.95))
    params = rows(40, top_p=0.95)
    for i in (0, 17, 39):
        alone = SamplingRows(
            *(getattr(params, name)[i : i + 1] for name in SamplingRows.__dataclass_fields__)
        )
        assert backend.sample(logits[i : i + 1], alone)[0] == together[i]
    assert (backend.sample(logits, rows(40, seed=8)) != backend.sample(logits, rows(40))).any()
    other = backend.sample(logits, rows(40, sample_index=1))
    assert (other != backend.sample(logits, rows(40))).any()


def test_edits_follow_the_definitions(backend: Backend) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((3, 10)).astype(np.float32)
    edits = LogitEdits(
        rows=np.array([0, 0, 1, 1, 2], np.int32),
        token_ids=np.array([3, 9, 3, 0, 5], np.int32),
        bias=np.array([0.5, 0, -2, 0, -np.inf], np.float32),
        seen=np.array([True, True, True, False, False]),
        counts=np.array([0, 2, 1, 3, 0], np.int32),
        repetition_penalty=np.array([1.3, 0.7, 1], np.float32),
        frequency_penalty=np.array([0.5, 0, 1], np.float32),
        presence_penalty=np.array([0.25, -1, 2], np.float32),
    )
    expected = logits.astype(np.float64)
    for i in range(5):
        row, token = edits.rows[i], edits.token_ids[i]
        expected[row, token] = reference.edit_logit(
            expected[row, token],
            bias=edits.bias[i],
            seen=bool(edits.seen[i]),
            count=int(edits.counts[i]),
            repetition=edits.repetition_penalty[row],
            frequency=edits.frequency_penalty[row],
            presence=edits.presence_penalty[row],
        )
    backend.edit_logits(logits, edits)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_token_logprobs(backend: Backend, k: int) -> None:
    rng = np.random.default_rng(3)
    logits = (5 * rng.standard_normal((6, 500))).astype(np.float32)
    logits[0, [4, 8]] = 40.0
    token_ids = np.array([8, 0, 1, 2, 3, 499], np.int32)
    table = backend.token_logprobs(logits, token_ids, k)
    expected = reference.log_softmax(logits)
    np.testing.assert_allclose(table.chosen, expected[np.arange(6), token_ids], atol=2e-5)
    ranks = 1 + (logits > logits[np.arange(6), token_ids][:, None]).sum(1)
    np.testing.assert_array_equal(table.ranks, ranks)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(table.top_token_ids, order)
    np.testing.assert_allclose(
        table.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=2e-5
    )


def test_the_chosen_logprob_is_the_same_number_as_in_the_top(backend: Backend) -> None:
    logits = np.random.default_rng(4).standard_normal((4, 300)).astype(np.float32)
    best = logits.argmax(1).astype(np.int32)
    table = backend.token_logprobs(logits, best, 3)
    np.testing.assert_array_equal(table.chosen, table.top_logprobs[:, 0])


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    key: int, counter: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The vectors that come with Random123."""
    words = philox4x32(np.uint64(key), *(np.uint64(word) for word in counter))
    assert tuple(int(word) for word in words) == expected
