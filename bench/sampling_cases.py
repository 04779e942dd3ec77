"""Cases of the ops on logits: edits, drawing a token, log-probabilities."""

from __future__ import annotations

import numpy as np

from bench.op_cases import OpCase, Prepared, normal
from rawpaged.backend import Backend, LogitEdits, SamplingRows
from rawpaged.models.config import ModelConfig
from tests import reference

_CHECKED_ROWS = 4
_EDITS_PER_ROW = 64
_TOP_LOGPROBS = 5
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 50, 0.95


def sampling_cases(model: ModelConfig, rows: int) -> list[OpCase]:
    """Logits are float32 whatever the weights are, and in memory when they are many."""
    vocab_size = model.vocab_size
    return [
        _sample("greedy", rows, vocab_size, temperature=0.0, top_k=0, top_p=1.0),
        _sample("temperature", rows, vocab_size, temperature=_TEMPERATURE, top_k=0, top_p=1.0),
        _sample(
            "top_k_top_p", rows, vocab_size, temperature=_TEMPERATURE, top_k=_TOP_K, top_p=_TOP_P
        ),
        _token_logprobs(rows, vocab_size),
        _edit_logits(rows, vocab_size),
    ]


def _sample(
    name: str, rows: int, vocab_size: int, *, temperature: float, top_k: int, top_p: float
) -> OpCase:
    params = SamplingRows(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
        positions=np.arange(rows, dtype=np.uint32),
        sample_indices=np.zeros(rows, np.uint32),
    )

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        logits = 3 * normal(rng, rows, vocab_size)

        def check() -> None:
            sampled = backend.sample(logits, params)
            if temperature == 0.0:
                np.testing.assert_array_equal(sampled, logits.argmax(1))
                return
            for row in range(min(rows, _CHECKED_ROWS)):
                kept = reference.kept_tokens(logits[row], temperature, top_k, top_p, 0.0)
                assert kept[sampled[row]], f"token {sampled[row]} of row {row} may not be drawn"

        return Prepared([lambda: backend.sample(logits, params)], check)

    return OpCase(
        op="sample",
        name=name,
        rows=rows,
        num_bytes=4 * rows * vocab_size,
        num_flops=0,
        prepare=prepare,
    )


def _token_logprobs(rows: int, vocab_size: int) -> OpCase:
    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        logits = 3 * normal(rng, rows, vocab_size)
        ids = rng.integers(0, vocab_size, rows).astype(np.int32)

        def check() -> None:
            table = backend.token_logprobs(logits, ids, _TOP_LOGPROBS)
            checked = np.arange(min(rows, _CHECKED_ROWS))
            expected = reference.log_softmax(logits[checked])
            np.testing.assert_allclose(
                table.chosen[checked], expected[checked, ids[checked]], atol=2e-5
            )
            order = np.argsort(-logits[checked], axis=1, kind="stable")[:, :_TOP_LOGPROBS]
            np.testing.assert_array_equal(table.top_token_ids[checked], order)

        return Prepared([lambda: backend.token_logprobs(logits, ids, _TOP_LOGPROBS)], check)

    return OpCase(
        op="token_logprobs",
        name=f"top_{_TOP_LOGPROBS}",
        rows=rows,
        num_bytes=4 * rows * vocab_size,
        num_flops=0,
        prepare=prepare,
    )


def _edit_logits(rows: int, vocab_size: int) -> OpCase:
    per_row = min(_EDITS_PER_ROW, vocab_size)

    def prepare(backend: Backend, rng: np.random.Generator) -> Prepared:
        logits = normal(rng, rows, vocab_size)
        tokens = np.stack([rng.permutation(vocab_size)[:per_row] for _ in range(rows)])
        edits = LogitEdits(
            rows=np.repeat(np.arange(rows, dtype=np.int32), per_row),
            token_ids=tokens.reshape(-1).astype(np.int32),
            bias=np.full(rows * per_row, 0.5, np.float32),
            seen=np.ones(rows * per_row, np.bool_),
            counts=np.ones(rows * per_row, np.int32),
            # A factor would take the logits out of range over many calls.
            repetition_penalty=np.ones(rows, np.float32),
            frequency_penalty=np.full(rows, 0.25, np.float32),
            presence_penalty=np.full(rows, 0.125, np.float32),
        )

        def check() -> None:
            row, token = 0, int(tokens[0, 0])
            expected = reference.edit_logit(
                float(logits[row, token]),
                bias=0.5,
                seen=True,
                count=1,
                repetition=1.0,
                frequency=0.25,
                presence=0.125,
            )
            backend.edit_logits(logits, edits)
            np.testing.assert_allclose(logits[row, token], expected, rtol=1e-5, atol=1e-6)

        return Prepared([lambda: backend.edit_logits(logits, edits)], check)

    return OpCase(
        op="edit_logits",
        name=f"{per_row}_a_row",
        rows=rows,
        # The logit read and written; row, token, bias and count of four bytes; the flag of one.
        num_bytes=rows * per_row * (8 + 16 + 1),
        num_flops=5 * rows * per_row,
        prepare=prepare,
    )
