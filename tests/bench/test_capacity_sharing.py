"""Shared blocks against a model that knows what every sequence has in every slot."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity.lengths import RequestSize
from bench.capacity.sharing import (
    BeamRecord,
    SequenceGroup,
    Sharing,
    measure_sharing,
    read_beam_record,
)

Token = tuple[int, int]
"""Which sequence made it, and when."""


def different_blocks(sequences: list[tuple[Token, ...]], block_size: int) -> int:
    """Least blocks that hold the sequences: one for each different beginning at a block's end."""
    beginnings = set()
    for tokens in sequences:
        for end in range(block_size, len(tokens) + block_size, block_size):
            beginnings.add(tokens[:end])
    return len(beginnings)


@settings(deadline=None)
@given(
    prompt_len=st.integers(1, 20),
    block_size=st.integers(1, 6),
    width=st.integers(1, 5),
    data=st.data(),
)
def test_beams_hold_what_their_contents_need(
    prompt_len: int, block_size: int, width: int, data: st.DataObject
) -> None:
    group = SequenceGroup(1000, block_size, prompt_len, width)
    pool = group.manager.block_pool
    sequences = [tuple((-1, place) for place in range(prompt_len))] * width
    parents_of = st.lists(st.integers(0, width - 1), min_size=width, max_size=width)
    for time in range(data.draw(st.integers(0, 12))):
        parents = data.draw(parents_of)
        group.reorder(parents)
        sequences = [sequences[parent] for parent in parents]
        group.manager.check_integrity()
        assert pool.num_used_blocks == different_blocks(sequences, block_size)
        group.append()
        sequences = [(*tokens, (beam, time)) for beam, tokens in enumerate(sequences)]
        group.manager.check_integrity(group.requests)
        assert pool.num_used_blocks == different_blocks(sequences, block_size)
        assert pool.num_refs == width * math.ceil(len(sequences[0]) / block_size)


def test_samples_copy_a_partly_filled_block_once_each_but_one() -> None:
    group = SequenceGroup(100, 16, 35, 4)
    assert group.manager.block_pool.num_used_blocks == 3
    group.append()
    assert group.manager.num_block_copies == 3
    assert group.manager.block_pool.num_used_blocks == 2 + 4
    group.append()
    assert group.manager.num_block_copies == 3


def test_a_prompt_that_fills_its_blocks_is_never_copied() -> None:
    group = SequenceGroup(100, 16, 32, 4)
    group.append()
    assert group.manager.num_block_copies == 0


def test_savings_worked_out_by_hand() -> None:
    # Prompt of 32 in 2 blocks; outputs of 17 take 16 slots, one block a sample, after step one.
    sharing = measure_sharing([RequestSize(32, 17)], 4, 16)
    assert sharing.without_sharing == pytest.approx((4 * 2 + 16 * 4 * 3) / 17)
    assert sharing.with_sharing == pytest.approx((2 + 16 * (2 + 4)) / 17)
    expected = 1 - (2 + 16 * 6) / (4 * 2 + 16 * 12)
    assert sharing.saving(1000) == pytest.approx(expected)


def test_a_prefix_is_held_once_for_all_requests() -> None:
    # 40 tokens of prefix: two blocks for everybody, and 8 tokens that each prompt has anew.
    sharing = measure_sharing([RequestSize(8, 1)], 1, 16, prefix_len=40)
    assert sharing == Sharing(1.0, 3.0, 2, 0.0)
    with_sharing, without_sharing = sharing.batched(100)
    assert with_sharing == 98
    assert without_sharing == pytest.approx(100 / 3)
    assert sharing.saving(100) == pytest.approx(1 - 100 / (98 * 3))


@pytest.mark.parametrize(
    ("parents", "saving"),
    [
        ([0, 1, 2, 3], "that of samples"),
        ([0, 0, 0, 0], "nearly three quarters"),
    ],
)
def test_beams_between_samples_and_one_survivor(parents: list[int], saving: str) -> None:
    sizes = [RequestSize(40, 200)]
    record = BeamRecord("made up", {4: [[parents]]})
    beams = measure_sharing(sizes, 4, 16, beams=record)
    if saving == "that of samples":
        assert beams == measure_sharing(sizes, 4, 16)
    else:
        # Only the last block differs: 3 of on average 9 blocks a beam.
        assert 0.6 < beams.saving(1000) < 0.75


def test_the_record_in_the_repository() -> None:
    folder = Path(__file__).parents[2] / "bench" / "capacity" / "data"
    record = read_beam_record(folder / "beam_parents.json")
    assert record.model == "smollm2-135m"
    assert record.num_steps >= 3000
    for width in (2, 4, 6):
        # Best first, so where two beams go on from one, the better beam cannot be passed over
        # always: the best beam goes on most often.
        steps = [step for search in record.searches[width] for step in search]
        survivals = [sum(beam in step for step in steps) for beam in range(width)]
        assert survivals == sorted(survivals, reverse=True)


def test_parents_go_through_all_searches_and_begin_again() -> None:
    record = BeamRecord("made up", {2: [[[0, 0], [0, 1]], [[1, 1]]]})
    assert list(islice(record.parents(2, 0), 4)) == [[0, 0], [0, 1], [1, 1], [0, 0]]
    assert list(islice(record.parents(2, 3), 3)) == [[1, 1], [0, 0], [0, 1]]


@pytest.mark.parametrize("word", ["0", "012", "02", "xy"])
def test_a_damaged_record_is_refused(tmp_path: Path, word: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"model": "m", "parents": {"2": [f"00 {word}"]}}))
    with pytest.raises(ValueError, match=r"is no step of 2 beams|invalid literal"):
        read_beam_record(path)
