"""The CPU backend's sampling ops: the suite that all share, edits of logits, Philox."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawpaged.backend import Backend
from rawpaged.cpu.philox import philox4x32
from tests import reference
from tests.ops.row_cases import edit_case
from tests.ops.sampling_suite import SamplingSuite, repeat, sampling_rows


@pytest.fixture
def dtype() -> str:
    """Logits are float32 whatever the weights are."""
    return "float32"


class TestSampling(SamplingSuite):
    @pytest.fixture
    def ops(self, backend: Backend) -> Backend:
        return backend


@pytest.mark.parametrize("size", [127, 129, 5003])
@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 3}, {"top_k": 60}, {"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.4},
     {"top_k": 60, "top_p": 0.5}],
    ids=str,
)  # fmt: skip
def test_many_blocks_of_logits(
    backend: Backend, size: int, spread: float, params: dict[str, Any]
) -> None:
    """Flat and steep distributions, more tokens to keep than blocks, and what no token has."""
    logits = (spread * np.random.default_rng(size).standard_normal(size)).astype(np.float32)
    logits[[5, size - 1]] = np.nan
    logits[7] = -np.inf
    logits[128 % size] = logits[~np.isnan(logits)].max()  # a tie for the largest
    asked: dict[str, Any] = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    known = np.where(np.isnan(logits), -np.inf, logits)
    with np.errstate(invalid="ignore"):
        kept = reference.kept_tokens(known, **asked)
    draws = 4000
    sampled = backend.sample(repeat(logits, draws), sampling_rows(draws, **asked))
    counts = np.bincount(sampled, minlength=size)
    assert not counts[~kept].any()
    expected = np.where(kept, np.exp(reference.log_softmax(known / 0.7)), 0)
    expected *= draws / expected.sum()
    assert (np.abs(counts - expected) <= 6 * np.sqrt(expected) + 5).all()
    assert (counts[expected > 20] > 0).all()


@pytest.mark.parametrize("k", [1, 50])
def test_logprobs_over_many_blocks(backend: Backend, k: int) -> None:
    """Ties within and across blocks are told by the lower id."""
    logits = np.random.default_rng(0).integers(-20, 20, (3, 1001)).astype(np.float32)
    ids = np.array([0, 500, 1000], np.int32)
    table = backend.token_logprobs(logits, ids, k)
    expected = reference.log_softmax(logits)
    np.testing.assert_allclose(table.chosen, expected[np.arange(3), ids], atol=2e-5)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(table.top_token_ids, order)
    assert (table.ranks == 1 + (logits > logits[np.arange(3), ids][:, None]).sum(1)).all()


def test_edits_follow_the_definitions(backend: Backend) -> None:
    case = edit_case()
    logits = case.logits.copy()
    backend.edit_logits(logits, case.edits)
    np.testing.assert_allclose(logits, case.expected, rtol=1e-6)


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
