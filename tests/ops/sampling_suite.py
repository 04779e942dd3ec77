"""What every sampler is held against: kept sets by sorting, distributions, log-probabilities."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import SamplingRows, TokenLogprobRows
from tests import reference

Float32 = npt.NDArray[np.float32]


class SamplingOps(Protocol):
    """The two ops, with host arrays in and out, as rawpaged.backend.Backend has them."""

    def sample(self, logits: Any, rows: SamplingRows) -> npt.NDArray[np.int32]: ...
    def token_logprobs(
        self, logits: Any, token_ids: npt.NDArray[np.int32], k: int
    ) -> TokenLogprobRows: ...


def sampling_rows(n: int, **given: Any) -> SamplingRows:
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


def repeat(row: Float32, n: int) -> Float32:
    return np.repeat(row[None], n, axis=0)


class SamplingSuite:
    """Tests of a sampler that a subclass gives as the fixture `ops`."""

    draws = 20_000
    """Draws of one row to look at a distribution."""

    def test_greedy_takes_the_lowest_of_equals(self, ops: SamplingOps) -> None:
        logits = np.array([[0, 3, 3, 1], [5, 5, 5, 5], [-9, -np.inf, -8, -8]], np.float32)
        assert ops.sample(logits, sampling_rows(3, temperature=0.0)).tolist() == [1, 0, 2]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_nothing_to_choose_from(self, ops: SamplingOps, temperature: float) -> None:
        logits = np.array([[np.nan] * 4, [-np.inf] * 4, [0, 1, 2, 3]], np.float32)
        sampled = ops.sample(logits, sampling_rows(3, temperature=temperature))
        assert sampled[:2].tolist() == [-1, -1]
        assert sampled[2] in range(4)

    @pytest.mark.parametrize("temperature", [1e-30, 1e-39, 1e-44])
    @pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
    def test_hardly_any_temperature(
        self, ops: SamplingOps, temperature: float, params: dict[str, float]
    ) -> None:
        """As none, also where its inverse is beyond the largest float32."""
        logits = np.array([[0, 3, 2.5, -np.inf, 1], [-9, -8, -7, -7.5, -80]], np.float32)
        rows = sampling_rows(2, temperature=temperature, **params)
        assert ops.sample(logits, rows).tolist() == [1, 2]

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
    def test_exactly_the_kept_tokens_are_drawn(
        self, ops: SamplingOps, params: dict[str, float]
    ) -> None:
        logits = (2 * np.random.default_rng(0).standard_normal(50)).astype(np.float32)
        given: dict[str, Any] = {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            **params,
        }
        kept = reference.kept_tokens(logits, **given)
        sampled = ops.sample(repeat(logits, self.draws), sampling_rows(self.draws, **params))
        counts = np.bincount(sampled, minlength=50)
        assert not counts[~kept].any()
        expected = np.where(kept, np.exp(reference.log_softmax(logits / given["temperature"])), 0)
        expected *= self.draws / expected.sum()
        # Five standard deviations of a binomial count.
        assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 5).all()

    def test_ties_at_the_threshold_are_all_kept(self, ops: SamplingOps) -> None:
        logits = np.array([3, 1, 1, 1, 0, 0], np.float32)
        n = min(self.draws, 3000)
        sampled = ops.sample(repeat(logits, n), sampling_rows(n, top_k=2))
        assert set(sampled.tolist()) == {0, 1, 2, 3}

    def test_a_draw_depends_on_seed_position_and_sample_alone(self, ops: SamplingOps) -> None:
        logits = np.random.default_rng(1).standard_normal((40, 300)).astype(np.float32)
        params = sampling_rows(40, top_p=0.95)
        together = ops.sample(logits, params)
        for i in (0, 17, 39):
            alone = SamplingRows(
                *(getattr(params, name)[i : i + 1] for name in SamplingRows.__dataclass_fields__)
            )
            assert ops.sample(logits[i : i + 1], alone)[0] == together[i]
        plain = ops.sample(logits, sampling_rows(40))
        assert (ops.sample(logits, sampling_rows(40, seed=8)) != plain).any()
        assert (ops.sample(logits, sampling_rows(40, sample_index=1)) != plain).any()

    @pytest.mark.parametrize("k", [0, 1, 5, 20])
    def test_token_logprobs(self, ops: SamplingOps, k: int) -> None:
        rng = np.random.default_rng(3)
        logits = (5 * rng.standard_normal((6, 500))).astype(np.float32)
        logits[0, [4, 8]] = 40.0
        token_ids = np.array([8, 0, 1, 2, 3, 499], np.int32)
        table = ops.token_logprobs(logits, token_ids, k)
        expected = reference.log_softmax(logits)
        np.testing.assert_allclose(table.chosen, expected[np.arange(6), token_ids], atol=2e-5)
        ranks = 1 + (logits > logits[np.arange(6), token_ids][:, None]).sum(1)
        np.testing.assert_array_equal(table.ranks, ranks)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(table.top_token_ids, order)
        np.testing.assert_allclose(
            table.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=2e-5
        )

    def test_the_chosen_logprob_is_the_same_number_as_in_the_top(self, ops: SamplingOps) -> None:
        logits = np.random.default_rng(4).standard_normal((4, 300)).astype(np.float32)
        best = logits.argmax(1).astype(np.int32)
        table = ops.token_logprobs(logits, best, 3)
        np.testing.assert_array_equal(table.chosen, table.top_logprobs[:, 0])
