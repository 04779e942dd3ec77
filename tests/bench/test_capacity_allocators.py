"""The textbook cases, and the buddy allocator against a list of slots."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity.allocators import (
    Allocator,
    ContiguousSlabs,
    DemandMappedMemory,
    OrcaReservation,
    PagedBlocks,
)
from bench.capacity.buddy import BuddyAllocator
from bench.capacity.lengths import RequestSize
from bench.capacity.model import A100_40GB, OPT_13B, StepModel

LLAMA_3_8B_TOKEN = 128 * 1024
"""Bytes of KV: 32 layers, 8 heads of 128, keys and values of two bytes."""


def waste_of(allocator: Allocator, num_tokens: int) -> float:
    """Slots that a request of so many tokens has beside them."""
    grant = allocator.admit(0, RequestSize(num_tokens, 1), num_tokens)
    assert grant is not None
    return grant.taken - num_tokens


def how_many(allocator: Allocator, size: RequestSize, num_tokens: int) -> int:
    """Requests that hold so many tokens each, until the next finds no room."""
    count = 0
    while allocator.admit(count, size, num_tokens) is not None:
        count += 1
    return count


def test_35_tokens_in_blocks_of_16_leave_13_slots() -> None:
    assert waste_of(PagedBlocks(1600, 16), 35) == 13


def test_40_tokens_leave_8_slots_against_2008_in_a_reservation() -> None:
    assert waste_of(PagedBlocks(16384, 16), 40) == 8
    assert waste_of(ContiguousSlabs(16384, 2048), 40) == 2008
    assert waste_of(OrcaReservation(16384, 2048, "max"), 40) == 2008


def test_50_gb_hold_46_slabs_or_about_380_paged_requests() -> None:
    slots = 50_000_000_000 // LLAMA_3_8B_TOKEN
    # A slab for a context of 8192 tokens is 1 GiB. Requests of 1000 tokens, on average.
    size = RequestSize(900, 101)
    assert how_many(ContiguousSlabs(slots, 8192), size, 1000) == 46
    count = how_many(PagedBlocks(slots, 16), size, 1000)
    assert count == 374, "63 blocks each, and 1 % of the pool is kept for those that run"
    assert slots // (63 * 16) == 378


def test_a_25_token_output_reserves_32() -> None:
    orca = OrcaReservation(4096, 2048, "pow2")
    assert orca.reservation(RequestSize(10, 25)) == 10 + 32 - 1
    assert orca.reservation(RequestSize(10, 32)) == 10 + 32 - 1
    assert orca.reservation(RequestSize(1500, 513)) == 2048, "no more than the longest request"
    assert OrcaReservation(4096, 2048, "oracle").reservation(RequestSize(10, 25)) == 34
    with pytest.raises(ValueError, match="policy='least' is not one of"):
        OrcaReservation(4096, 2048, "least")


def test_the_memory_of_opt_13b_on_an_a100_as_the_paper_has_it() -> None:
    assert OPT_13B.kv_bytes_per_token == 800 * 1024
    assert StepModel().num_kv_slots == 15728, "15.7K in the paper's table 1"
    assert how_many(OrcaReservation(15728, 2048, "max"), RequestSize(100, 100), 100) == 7


@pytest.mark.parametrize(("page_kib", "tokens_in_a_row"), [(64, 6.4), (128, 12.8), (2048, 204.8)])
def test_vattention_maps_a_page_in_every_layer(page_kib: int, tokens_in_a_row: float) -> None:
    memory = DemandMappedMemory(
        A100_40GB.kv_bytes, page_kib * 1024, OPT_13B.num_layers, OPT_13B.layer_kv_bytes
    )
    pages_needed = 2 * 40 * math.ceil(500 * 10240 / (page_kib * 1024))
    grant = memory.admit(0, RequestSize(400, 200), 500)
    assert grant is not None
    assert grant.slots == pytest.approx(pages_needed / 80 * tokens_in_a_row)
    assert memory.num_rows == 12 * 2**30 // (page_kib * 1024 * 80)
    grown = memory.grow(0, math.floor(grant.slots) + 1)
    assert grown is not None
    assert grown.slots == pytest.approx(grant.slots + tokens_in_a_row)


def test_pages_are_all_given_and_taken_back() -> None:
    # 100 rows of 8 pages: 4 layers of 10 bytes a token, pages of 48 bytes. 13 tokens take 3 rows.
    memory = DemandMappedMemory(100 * 8 * 48, 48, 4, 10)
    assert how_many(memory, RequestSize(13, 100), 13) == 33, "one row is kept back"
    assert memory.grow(0, 15) is not None
    assert memory.grow(1, 15) is None
    for key in range(33):
        memory.free(key)
    assert how_many(memory, RequestSize(4, 100), 4) == 99
    # 24 tokens fill 5 rows to the last byte.
    assert how_many(DemandMappedMemory(100 * 8 * 48, 48, 4, 10), RequestSize(24, 1), 24) == 19


def test_what_grows_keeps_one_percent_for_those_that_run() -> None:
    memory = PagedBlocks(100 * 16, 16)
    size = RequestSize(16, 600)
    assert how_many(memory, size, 16) == 99
    assert memory.grow(0, 17) is not None, "the last block"
    assert memory.grow(1, 17) is None
    memory.free(2)
    assert memory.grow(1, 17) is not None
    memory.manager.check_integrity()


def test_what_never_fits() -> None:
    assert not PagedBlocks(100 * 16, 16).fits(RequestSize(99 * 16, 2))
    assert PagedBlocks(100 * 16, 16).fits(RequestSize(99 * 16, 1))
    assert not ContiguousSlabs(2047, 2048).fits(RequestSize(1, 1))
    assert not OrcaReservation(3000, 2048, "oracle").fits(RequestSize(2048, 2))
    assert OrcaReservation(3000, 2048, "oracle").fits(RequestSize(2047, 2))


@settings(deadline=None)
@given(
    capacity=st.integers(1, 200),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 80)), max_size=60),
)
def test_buddies_against_a_list_of_slots(capacity: int, moves: list[tuple[bool, int]]) -> None:
    buddy = BuddyAllocator(capacity)
    whole = buddy.free_pieces()
    assert sum(size for _, size in whole) == capacity
    owner: list[int | None] = [None] * capacity
    live: list[tuple[int, int]] = []

    def free_aligned(size: int) -> list[int]:
        return [
            start
            for start in range(0, capacity - size + 1, size)
            if all(slot is None for slot in owner[start : start + size])
        ]

    for takes, number in moves:
        if takes:
            size = 1 << math.ceil(math.log2(number))
            offset = buddy.take(number)
            # With full merging, a piece is there exactly when an aligned run of free slots is.
            assert (offset is None) == (not free_aligned(size))
            if offset is not None:
                assert offset in free_aligned(size)
                owner[offset : offset + size] = [offset] * size
                live.append((offset, size))
        elif live:
            offset, size = live.pop(number % len(live))
            buddy.give_back(offset)
            owner[offset : offset + size] = [None] * size
        assert buddy.num_free == owner.count(None)
        assert buddy.num_free == sum(size for _, size in buddy.free_pieces())
    for offset, _ in live:
        buddy.give_back(offset)
    assert buddy.free_pieces() == whole
