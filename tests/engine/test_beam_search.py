"""The rules of beam search against slow obvious references, over random tables of probabilities."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rawpaged.engine.beam_search import (
    BeamRules,
    BeamSearch,
    Candidates,
    Hypothesis,
)
from rawpaged.sampling_params import EarlyStopping

Tokens = tuple[int, ...]
Model = Callable[[Tokens], list[float]]
"""Log-probability of each token of the vocabulary after those."""

EARLY_STOPPING: tuple[EarlyStopping, ...] = (False, True, "never")


def random_model(seed: int, vocab_size: int, *, ties: bool = False) -> Model:
    """Probabilities that depend on the last two tokens; with `ties` they are often equal."""

    def logprobs(tokens: Tokens) -> list[float]:
        rng = random.Random(repr((seed, tokens[-2:])))
        weights = [rng.choice((1, 2, 4)) if ties else rng.expovariate(1) for _ in range(vocab_size)]
        total = sum(weights)
        return [math.log(weight / total) for weight in weights]

    return logprobs


def best_candidates(model: Model, tokens: Tokens, count: int) -> Candidates:
    logprobs = model(tokens)
    ids = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:count]
    return Candidates(ids, [logprobs[i] for i in ids])


def run_search(
    model: Model, rules: BeamRules, keep: int | None = None
) -> tuple[list[Hypothesis], int]:
    """The hypotheses, and after how many tokens the search was over."""
    search = BeamSearch(rules, keep_candidates=keep)
    beams: list[Tokens] = [()]
    while not search.is_finished:
        assert search.num_beams == len(beams)
        step = search.step([best_candidates(model, b, rules.num_candidates) for b in beams])
        beams = [(*beams[p], token) for p, token in zip(step.parents, step.token_ids, strict=True)]
    return search.hypotheses(), search.num_tokens


def reference(model: Model, rules: BeamRules) -> tuple[list[tuple[Tokens, float, float]], int]:
    """Tokens, log-probability and score of each hypothesis, and the number of steps.

    Written down from transformers' loop, over all continuations of all beams.
    """
    running: list[tuple[Tokens, float]] = [((), 0.0)]
    ended: list[tuple[Tokens, float, float]] = []
    for length in range(1, rules.max_tokens + 1):
        everything = []
        for tokens, total in running:
            row = model(tokens)
            for token_id in sorted(range(len(row)), key=lambda i: -row[i]):
                if token_id in rules.stop_token_ids and length <= rules.min_tokens:
                    continue
                everything.append(((*tokens, token_id), total + row[token_id]))
        everything.sort(key=lambda entry: -entry[1])
        is_last = length == rules.max_tokens
        stops = [tokens[-1] in rules.stop_token_ids or is_last for tokens, _ in everything]
        for (tokens, total), stop in list(zip(everything, stops, strict=True))[: rules.width]:
            if stop:
                ended.append((tokens, total, total / length**rules.length_penalty))
        ended = sorted(ended, key=lambda entry: -entry[2])[: rules.width]
        running = [e for e, stop in zip(everything, stops, strict=True) if not stop]
        running = running[: rules.width]
        if not running:
            return ended, length
        if len(ended) == rules.width:
            if rules.early_stopping is True:
                return ended, length
            at = length
            if rules.early_stopping == "never" and rules.length_penalty > 0:
                at = rules.max_tokens
            if running[0][1] / at**rules.length_penalty <= ended[-1][2]:
                return ended, length
    raise AssertionError("the last step ends every beam")


def assert_equal(
    got: list[Hypothesis], expected: list[tuple[Tokens, float, float]], rules: BeamRules
) -> None:
    assert [tuple(h.token_ids) for h in got] == [tokens for tokens, _, _ in expected]
    for hypothesis, (tokens, total, score) in zip(got, expected, strict=True):
        assert hypothesis.cumulative_logprob == total
        assert hypothesis.score == score
        assert hypothesis.is_ended == (tokens[-1] in rules.stop_token_ids)
        assert hypothesis.cumulative_logprob == pytest.approx(
            sum(token.logprob for token in hypothesis.tokens)
        )


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("width", range(1, 9))
def test_against_the_reference(width: int, early_stopping: EarlyStopping) -> None:
    """Given `num_candidates` of each beam, where the reference sees the whole vocabulary."""
    lengths = set()
    for seed in range(40):
        rng = random.Random(seed)
        vocab_size = rng.choice((3, 7, 30))
        rules = BeamRules(
            width,
            max_tokens=rng.randint(1, 12),
            stop_token_ids=frozenset(rng.sample(range(vocab_size), rng.randint(0, 2))),
            min_tokens=rng.choice((0, 0, 2)),
            length_penalty=rng.choice((0.0, 0.5, 1.0, 2.0, -1.0)),
            early_stopping=early_stopping,
        )
        rules = replace(rules, min_tokens=min(rules.min_tokens, rules.max_tokens))
        model = random_model(seed, vocab_size, ties=seed % 4 == 0)
        expected, num_steps = reference(model, rules)
        got, num_tokens = run_search(model, rules)
        assert_equal(got, expected, rules)
        assert num_tokens == num_steps
        lengths.add(rules.max_tokens - num_steps)
    # Some ended before max_tokens, so that early stopping was tried too.
    assert len(lengths) > 1


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
def test_wide_beams_find_the_best_of_all_sequences(length_penalty: float) -> None:
    """With room for every sequence the result is all of them, in order of score."""
    for seed in range(10):
        model = random_model(seed, 3)
        rules = BeamRules(
            81, 4, frozenset({2}), length_penalty=length_penalty, early_stopping="never"
        )
        everything = []
        for length in range(1, 5):
            for tokens in itertools.product(range(3), repeat=length):
                if 2 in tokens[:-1] or (length < 4 and tokens[-1] != 2):
                    continue
                total = sum(model(tokens[:i])[token] for i, token in enumerate(tokens))
                everything.append((tokens, total / length**length_penalty))
        everything.sort(key=lambda entry: -entry[1])
        got, _ = run_search(model, rules)
        assert [tuple(h.token_ids) for h in got] == [tokens for tokens, _ in everything]
        assert [h.score for h in got] == pytest.approx([score for _, score in everything])


def test_early_stopping_kinds_end_at_different_lengths() -> None:
    """True ends soonest, "never" latest, and each kind differs from the others somewhere."""
    seen = set()
    for seed in range(60):
        model = random_model(seed, 8)
        rules = BeamRules(2, 20, frozenset({0, 1}), length_penalty=1.0)
        lengths = [
            run_search(model, replace(rules, early_stopping=kind))[1]
            for kind in (True, False, "never")
        ]
        assert lengths == sorted(lengths)
        seen.add((lengths[0] < lengths[1], lengths[1] < lengths[2]))
    assert (True, True) in seen


def test_candidates_and_ranks_are_told() -> None:
    model = random_model(1, 9, ties=True)
    got, _ = run_search(model, BeamRules(3, 5, frozenset({8})), keep=2)
    for hypothesis in got:
        for position, token in enumerate(hypothesis.tokens):
            row = model(tuple(hypothesis.token_ids[:position]))
            assert token.logprob == row[token.token_id]
            assert token.rank == 1 + sum(logprob > token.logprob for logprob in row)
            best = best_candidates(model, tuple(hypothesis.token_ids[:position]), 2)
            assert token.candidates == best


def test_hypotheses_of_a_search_that_is_cut_off() -> None:
    """Ended ones first, then beams as they are, with their scores at this length."""
    model = random_model(5, 6)
    rules = BeamRules(3, 10, frozenset({0, 1}))
    search = BeamSearch(rules)
    assert search.hypotheses() == []
    beams: list[Tokens] = [()]
    for _ in range(2):
        step = search.step([best_candidates(model, b, rules.num_candidates) for b in beams])
        beams = [(*beams[p], t) for p, t in zip(step.parents, step.token_ids, strict=True)]
    got = search.hypotheses()
    ended = [h for h in got if h.is_ended]
    going = got[len(ended) :]
    assert 0 < len(ended) < len(got) == rules.width
    assert [tuple(h.token_ids) for h in going] == beams[: len(going)]
    assert [h.score for h in going] == [h.cumulative_logprob / 2 for h in going]


def test_tokens_without_probability_are_chosen_last() -> None:
    search = BeamSearch(BeamRules(2, 2))
    search.step([Candidates([4, 5], [0.0, -math.inf])])
    search.step([Candidates([1, 2], [-1.0, -3.0]), Candidates([1, 2], [-1.0, -2.0])])
    assert [h.token_ids for h in search.hypotheses()] == [[4, 1], [4, 2]]
