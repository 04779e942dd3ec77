"""What products fetch for attention: all that it reads and nothing else, each piece once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.backend import AttentionPlan, BatchMeta, KVCache
from rawpaged.cpu.attention_work import PARTITION, split_work
from rawpaged.cpu.fetch_lists import list_pieces
from rawpaged.cpu.kv_ahead import MOST_BYTES, KVAhead, Share
from rawpaged.cpu.kv_cache import new_kv_cache
from rawpaged.cpu.threads import ThreadTeam
from rawpaged.cpu.vector_ir import FETCHED_BYTES
from tests.tiny import engine_of, tiny_config

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 48, 16
BLOCK_BYTES = NUM_KV_HEADS * HEAD_DIM * BLOCK_SIZE * 2  # bfloat16; three pieces


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    team = ThreadTeam(1)
    yield team
    team.close()


def make_cache(num_blocks: int) -> KVCache:
    return new_kv_cache(num_blocks, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, "bfloat16", None)


def make_plan(
    queries: list[int], contexts: list[int], tables: list[list[int]], num_threads: int = 2
) -> AttentionPlan:
    """Requests with so many new tokens at the end of their contexts."""
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    positions = [
        np.arange(context - new, context) for new, context in zip(queries, contexts, strict=True)
    ]
    num_tokens = sum(queries)
    meta = BatchMeta(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.zeros(num_tokens, np.int64),
        query_start_loc=np.cumsum([0, *queries], dtype=np.int32),
        seq_lens=np.array(contexts, np.int32),
        block_tables=block_tables,
        logits_rows=np.zeros(0, np.int32),
    )
    return AttentionPlan(
        token_ids=meta.token_ids,
        positions=meta.positions,
        slot_mapping=meta.slot_mapping,
        query_start_loc=meta.query_start_loc,
        seq_lens=meta.seq_lens,
        block_tables=meta.block_tables,
        logits_rows=meta.logits_rows,
        num_tokens=num_tokens,
        work=split_work(meta, NUM_HEADS, NUM_KV_HEADS, num_threads),
    )


def fetched(share: Share, num_items: int, room: int = 999) -> list[int]:
    """Addresses that the items of a product fetch, one item after the other."""
    found: list[int] = []
    for item in range(num_items):
        listed = np.zeros(room + 1, np.int64)
        count = list_pieces(listed[:-1], *share, item, num_items)
        assert not listed[count:].any(), "after the last"
        found += listed[:count].tolist()
    return found


def pieces_of(cache: KVCache, blocks: list[int]) -> list[int]:
    return [
        pool.ctypes.data + block * BLOCK_BYTES + piece * FETCHED_BYTES
        for block in blocks
        for pool in (cache.keys, cache.values)
        for piece in range(BLOCK_BYTES // FETCHED_BYTES)
    ]


def test_products_before_an_attention_fetch_what_it_reads(team: ThreadTeam) -> None:
    """Shared between them, whatever their sizes; after the last, for the next step's first."""
    plan = make_plan([1, 1, 1], [40, 16, 65], [[7, 2, 5], [9], [1, 3, 4, 6, 8]])
    caches = [make_cache(10) for _ in range(2)]
    ahead = KVAhead(team)
    shares: list[list[Share]] = []

    def forward() -> None:
        for cache in caches:
            shares.append([ahead.share(work) for work in (3, 1, 6)])
            ahead.before_attention(cache, plan, None)
        shares.append([ahead.share(work) for work in (2, 9)])

    team.replay(team.record(ahead.recording(forward)))
    for products, cache in zip(shares, (*caches, caches[0]), strict=True):
        found: list[int] = []
        for share, num_items in zip(products, (8, 37, 120), strict=False):
            found += fetched(share, num_items)
        assert sorted(found) == sorted(pieces_of(cache, list(range(1, 10))))


def test_shares_are_in_proportion_to_work(team: ThreadTeam) -> None:
    plan = make_plan([1], [PARTITION], [list(range(16))], num_threads=1)
    ahead = KVAhead(team)
    shares: list[Share] = []

    def forward() -> None:
        shares.extend(ahead.share(work) for work in (1, 3))
        ahead.before_attention(make_cache(16), plan, None)

    team.replay(team.record(ahead.recording(forward)))
    few, many = (len(fetched(share, 8)) for share in shares)
    assert few + many == 16 * 2 * BLOCK_BYTES // FETCHED_BYTES
    assert many == 3 * few


def test_items_fetch_in_the_order_of_tasks(team: ThreadTeam) -> None:
    """The first half of each product from the first half of the list."""
    plan = make_plan([1] * 4, [32] * 4, [[2 * i, 2 * i + 1] for i in range(4)])
    cache, ahead = make_cache(8), KVAhead(team)
    shares: list[Share] = []

    def forward() -> None:
        shares.extend(ahead.share(1) for _ in range(2))
        ahead.before_attention(cache, plan, None)

    team.replay(team.record(ahead.recording(forward)))
    for share in shares:
        found = fetched(share, 16)
        middle = set(pieces_of(cache, [0, 1, 2, 3]))
        half = len(found) // 2
        assert set(found[:half]) <= middle
        assert not set(found[half:]) & middle


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_single_queries_are_listed_and_prompts_are_not(team: ThreadTeam, num_threads: int) -> None:
    """Also such as are split among threads, whose last block is partly used."""
    lengths = [1, 30, 17, 3 * PARTITION + 5, 12 * PARTITION]
    tables, first = [], 0
    for length in lengths:
        tables.append(list(range(first, first + -(-length // BLOCK_SIZE))))
        first += len(tables[-1])
    own = [block for i in (0, 2, 3, 4) for block in tables[i]]
    plan = make_plan([1, 30, 1, 1, 1], lengths, tables, num_threads)
    cache, ahead = make_cache(first), KVAhead(team)
    shares: list[Share] = []

    def forward() -> None:
        shares.append(ahead.share(1))
        ahead.before_attention(cache, plan, None)

    team.replay(team.record(ahead.recording(forward)))
    assert sorted(fetched(shares[0], 8)) == sorted(pieces_of(cache, own))


def test_no_more_than_a_cache_keeps(team: ThreadTeam) -> None:
    most = MOST_BYTES // (2 * BLOCK_BYTES)
    table = list(range(most + 40))
    plan = make_plan([1], [len(table) * BLOCK_SIZE], [table], num_threads=1)
    cache, ahead = make_cache(len(table)), KVAhead(team)
    shares: list[Share] = []

    def forward() -> None:
        shares.append(ahead.share(1))
        ahead.before_attention(cache, plan, None)

    team.replay(team.record(ahead.recording(forward)))
    assert fetched(shares[0], 8, room=9999) == pieces_of(cache, table[:most])


def test_what_there_is_no_room_for_is_left_out(team: ThreadTeam) -> None:
    plan = make_plan([1], [PARTITION], [list(range(16))], num_threads=1)
    cache, ahead = make_cache(16), KVAhead(team)
    shares: list[Share] = []

    def forward() -> None:
        shares.append(ahead.share(1))
        ahead.before_attention(cache, plan, None)

    team.replay(team.record(ahead.recording(forward)))
    whole = pieces_of(cache, list(range(16)))
    assert len(whole) == 96
    # Twelve pieces an item, of which five have room.
    expected = [whole[12 * item + i] for item in range(8) for i in range(5)]
    assert fetched(shares[0], 8, room=5) == expected


def test_nothing_is_fetched_for_windows_and_outside_recordings(team: ThreadTeam) -> None:
    plan = make_plan([1], [40], [[0, 1, 2]])
    ahead = KVAhead(team)
    shares = [ahead.share(1)]
    ahead.before_attention(make_cache(3), plan, None)

    def forward() -> None:
        shares.append(ahead.share(1))
        ahead.before_attention(make_cache(3), plan, 32)
        shares.append(ahead.share(1))

    team.replay(team.record(ahead.recording(forward)))
    shares.append(ahead.share(1))
    assert len(shares) == 4
    for share in shares:
        assert fetched(share, 8) == []


def test_a_recording_that_fails_leaves_nothing(team: ThreadTeam) -> None:
    ahead = KVAhead(team)
    cache, plan = make_cache(3), make_plan([1], [40], [[0, 1, 2]])

    def forward(*, fails: bool, shares: list[Share]) -> None:
        shares.append(ahead.share(1))
        if fails:
            raise RuntimeError("no memory")
        ahead.before_attention(cache, plan, None)

    lost: list[Share] = []
    with pytest.raises(RuntimeError):
        team.record(ahead.recording(partial(forward, fails=True, shares=lost)))
    kept: list[Share] = []
    recorded = team.record(ahead.recording(partial(forward, fails=False, shares=kept)))
    team.replay(recorded)
    assert sorted(fetched(kept[0], 8)) == sorted(pieces_of(cache, [0, 1, 2]))
    assert fetched(lost[0], 8) == []


def test_pools_of_small_blocks(team: ThreadTeam) -> None:
    """A block smaller than a piece is fetched as one, with what follows it."""
    cache: KVCache = new_kv_cache(4, 1, 16, BLOCK_SIZE, "bfloat16", None)
    plan = make_plan([1], [40], [[3, 1, 2]])
    ahead = KVAhead(team)
    shares: list[Share] = []

    def forward() -> None:
        shares.append(ahead.share(1))
        ahead.before_attention(cache, plan, None)

    team.replay(team.record(ahead.recording(forward)))

    def addresses(pool: npt.NDArray[np.uint16]) -> set[int]:
        return {pool[block].ctypes.data for block in (3, 1, 2)}

    assert set(fetched(shares[0], 8)) == addresses(cache.keys) | addresses(cache.values)


def test_steps_of_a_model_are_recorded_with_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with prompts and those without: every layer's products, for every layer's cache."""
    assigned: list[tuple[int, int]] = []
    assign = KVAhead._assign

    def note(self: KVAhead, cache: KVCache) -> None:
        assigned.append((cache.keys.ctypes.data, len(self._waiting)))
        assign(self, cache)

    monkeypatch.setattr(KVAhead, "_assign", note)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with LLM(tiny_config()) as llm:
        caches = [cache.keys.ctypes.data for cache in engine_of(llm).runner.kv_caches]
        for num_prompts in (1, 3):
            llm.generate([[3, 4, 5]] * num_prompts, params, use_tqdm=False)
    size = len(caches) + 1
    recordings = [assigned[first : first + size] for first in range(0, len(assigned), size)]
    for recording in recordings:
        assert [address for address, _ in recording] == [*caches, caches[0]]
        assert [number for _, number in recording[:-1]] == [1] + [4] * (len(caches) - 1)
    # The last layer's, and in steps without prompts the product for logits.
    assert {recording[-1][1] for recording in recordings} == {3, 4}
