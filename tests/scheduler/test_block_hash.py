from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.block_hash import NO_PARENT, extend_block_hashes, hash_block

TOKENS = st.lists(st.integers(0, 3), max_size=4)
KEYS = st.lists(st.text("a\0\x01", max_size=4), max_size=3)


def test_digest_is_blake2b_of_parent_tokens_and_keys() -> None:
    data = NO_PARENT + array("q", [2, 5, 6]).tobytes() + (4).to_bytes(8, "little") + b"salt"
    assert hash_block(NO_PARENT, [5, 6], ["salt"]) == hashlib.blake2b(data, digest_size=32).digest()


@given(a=st.tuples(TOKENS, KEYS), b=st.tuples(TOKENS, KEYS))
def test_only_equal_inputs_have_equal_digests(
    a: tuple[list[int], list[str]], b: tuple[list[int], list[str]]
) -> None:
    assert (hash_block(NO_PARENT, *a) == hash_block(NO_PARENT, *b)) == (a == b)


@pytest.mark.parametrize(
    ("a", "b"),
    [(["ab"], ["a", "b"]), (["", "a"], ["a", ""]), ([], [""]), (["\ud800"], ["\ud801"])],
)
def test_keys_cannot_run_into_each_other(a: Sequence[str], b: Sequence[str]) -> None:
    assert hash_block(NO_PARENT, [1], a) != hash_block(NO_PARENT, [1], b)


def test_digest_depends_on_the_parent_and_on_large_token_ids() -> None:
    parent = hash_block(NO_PARENT, [1, 2])
    assert hash_block(parent, [1, 2]) != parent
    assert hash_block(NO_PARENT, [1]) != hash_block(NO_PARENT, [1 + 2**32])


def test_block_hashes_grow_with_full_blocks_only() -> None:
    request = Request("a", [1, 2, 3], SamplingParams(), max_tokens=9)
    extend_block_hashes(request, 2)
    first = hash_block(NO_PARENT, [1, 2])
    assert request.block_hashes == [first]
    request.token_ids += [4, 5]
    extend_block_hashes(request, 2)
    extend_block_hashes(request, 2)
    assert request.block_hashes == [first, hash_block(first, [3, 4])]
