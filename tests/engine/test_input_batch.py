"""Batches of single tokens are what the general way of making them says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rawpaged.engine.input_batch import make_batch, make_decode_batch
from rawpaged.scheduler.output import UNKNOWN_TOKEN, ScheduledRequest, SchedulerOutput

BLOCK_SIZE = 4


@st.composite
def single_tokens(draw: st.DrawFn) -> SchedulerOutput:
    scheduled = []
    for row in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 30))
        num_blocks = start // BLOCK_SIZE + 1
        table = draw(st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks))
        # One whose token has its KV already computes it for the logits alone.
        first_stored = start + draw(st.booleans())
        token_id = draw(st.one_of(st.just(UNKNOWN_TOKEN), st.integers(0, 319)))
        scheduled.append(
            ScheduledRequest(
                str(row), (token_id,), start, tuple(table), samples=True, first_stored=first_stored
            )
        )
    return SchedulerOutput(tuple(scheduled), ())


@given(single_tokens())
def test_a_decode_batch_is_that_batch(output: SchedulerOutput) -> None:
    sampled_rows = {item.request_id: 7 * row for row, item in enumerate(output.scheduled)}
    meta = make_batch(output, BLOCK_SIZE, sampled_rows)
    batch = make_decode_batch(output, BLOCK_SIZE, sampled_rows)
    assert batch is not None
    assert list(batch.token_ids) == meta.token_ids.tolist()
    assert list(batch.positions) == meta.positions.tolist() == (meta.seq_lens - 1).tolist()
    assert list(batch.slots) == meta.slot_mapping.tolist()
    for row, table in enumerate(batch.block_tables):
        assert meta.block_tables[row, : len(table)].tolist() == list(table)
    assert meta.logits_rows.tolist() == np.arange(len(output.scheduled)).tolist()


def test_a_batch_of_something_else_is_none() -> None:
    one = ScheduledRequest("a", (5,), 3, (0,), samples=True)
    two = ScheduledRequest("b", (5, 6), 2, (0,), samples=True)
    silent = one._replace(samples=False)
    for other in (two, silent):
        assert make_decode_batch(SchedulerOutput((one, other), ()), BLOCK_SIZE) is None


def test_tokens_of_prompts_can_be_kept_out() -> None:
    output = SchedulerOutput((ScheduledRequest("a", (5,), 3, (0,), samples=True),), ())
    for num_prompt_tokens, is_taken in ((3, True), (4, False)):
        batch = make_decode_batch(output, BLOCK_SIZE, num_prompt_tokens=[num_prompt_tokens])
        assert (batch is not None) == is_taken
