"""The map of the pool beside one made block by block, and through a running AsyncEngine."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from rawpaged import AsyncEngine, RequestOutputKind, SamplingParams
from rawpaged.engine.block_map import BlockMap, make_block_map
from rawpaged.errors import EngineClosedError, InvalidRequestError
from rawpaged.request import RequestStatus
from tests.scheduler.harness import Runner, make_config, make_group, make_request
from tests.tiny import engine_of, tiny_config


@dataclass(frozen=True)
class Block:
    owners: frozenset[str]
    ref_count: int
    num_tokens: int
    is_cached: bool


def looked_up(runner: Runner) -> list[Block]:
    """Every block of the pool, taken from pool and block tables one question at a time."""
    scheduler = runner.scheduler
    manager, block_size = scheduler.kv_cache_manager, scheduler.config.block_size
    running = [r for r in runner.requests.values() if r.status is RequestStatus.RUNNING]
    blocks = []
    for block_id in range(scheduler.config.num_blocks):
        num_tokens = {}
        for request in running:
            for index, held in enumerate(manager.block_table(request.request_id)):
                if held == block_id:
                    left = request.num_computed_tokens - index * block_size
                    num_tokens[request.request_id] = min(max(left, 0), block_size)
        blocks.append(
            Block(
                frozenset(num_tokens),
                manager.block_pool.ref_count(block_id),
                max(num_tokens.values(), default=0),
                manager.block_pool.block_hash(block_id) is not None,
            )
        )
    return blocks


def unfolded(block_map: BlockMap) -> list[Block]:
    """A block for each of the map; fails unless runs follow on each other and each is longest."""
    blocks: list[Block] = []
    for run in block_map.runs:
        assert run.first_block == block_map.first_block + len(blocks)
        assert run.num_blocks > 0
        owners = [block_map.requests[index].request_id for index in block_map.owners[run.owners]]
        block = Block(frozenset(owners), run.ref_count, run.num_tokens, run.is_cached)
        assert len(owners) == len(block.owners)
        assert block not in blocks[-1:], "two runs could be one"
        blocks += [block] * run.num_blocks
    assert block_map.next_block == block_map.first_block + len(blocks)
    assert block_map.owners[0] == []
    assert len({tuple(owners) for owners in block_map.owners}) == len(block_map.owners)
    return blocks


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_every_step_of_a_crowded_pool(enable_prefix_caching: bool) -> None:
    rng = random.Random(11)
    runner = Runner(
        make_config(
            num_blocks=30,
            block_size=3,
            max_num_seqs=6,
            max_model_len=42,
            enable_prefix_caching=enable_prefix_caching,
        )
    )
    most_owners = num_cached = num_shared_open = 0
    for number in range(60):
        prompt = [number % 3] * rng.randint(1, 12) + [number % 2] * rng.randint(0, 6)
        n = rng.choice((1, 1, 2, 3))
        runner.add_group(make_group(f"r{number}", n, prompt, rng.randint(1, 12), lockstep=n == 2))
        for _ in range(rng.randint(0, 3)):
            runner.step()
            expected = looked_up(runner)
            snapshot = runner.scheduler.pool_snapshot()
            whole = make_block_map(snapshot, step=1, first_block=0, num_blocks=30)
            assert unfolded(whole) == expected
            first, count = rng.randrange(30), rng.randint(1, 30)
            part = make_block_map(snapshot, step=1, first_block=first, num_blocks=count)
            assert unfolded(part) == expected[first : first + count]
            assert part.regions == whole.regions
            assert whole.regions.used == [int(block.ref_count > 0) for block in expected]
            assert whole.regions.cached == [
                int(block.is_cached and block.ref_count == 0) for block in expected
            ]
            num_shared_open += sum(
                block.ref_count > 1 and block.num_tokens < 3 for block in expected
            )
            most_owners = max(most_owners, *(len(block.owners) for block in expected))
            num_cached += sum(whole.regions.cached)
    assert most_owners > 2
    assert num_shared_open > 0
    assert (num_cached > 0) is enable_prefix_caching


def test_requests_are_told_without_their_tokens() -> None:
    runner = Runner(make_config(max_num_batched_tokens=6, max_num_seqs=2))
    for token_id, (name, length) in enumerate((("a", 5), ("b", 9), ("c", 3))):
        runner.add(make_request(name, [token_id] * length, 5))
    runner.step()
    block_map = make_block_map(
        runner.scheduler.pool_snapshot(), step=3, first_block=0, num_blocks=4
    )
    a, b = block_map.requests
    assert [a.request_id, b.request_id] == ["a", "b"]
    assert (a.num_prompt_tokens, a.num_tokens, a.num_computed_tokens, a.num_blocks) == (5, 6, 5, 2)
    # The blocks of a prompt that is computed in chunks are there from its first step on.
    assert (b.num_prompt_tokens, b.num_tokens, b.num_computed_tokens, b.num_blocks) == (9, 9, 1, 3)
    assert (block_map.step, block_map.num_waiting, block_map.block_size) == (3, 1, 4)


@pytest.mark.parametrize(("num_blocks", "size"), [(1, 1), (256, 1), (257, 2), (1000, 4)])
def test_regions_cover_the_pool(num_blocks: int, size: int) -> None:
    runner = Runner(make_config(num_blocks=num_blocks, block_size=8, max_model_len=8))
    runner.add(make_request("a", [1] * 3))
    runner.step()
    snapshot = runner.scheduler.pool_snapshot()
    regions = make_block_map(snapshot, step=1, first_block=0, num_blocks=1).regions
    assert regions.num_blocks == size
    assert len(regions.used) == len(regions.cached) == -(-num_blocks // size) <= 256
    assert (sum(regions.used), regions.used[0], sum(regions.cached)) == (1, 1, 0)


def test_async_engine() -> None:
    async def main(engine: AsyncEngine) -> tuple[BlockMap, BlockMap]:
        params = SamplingParams(
            n=3, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        stream = engine.generate(list(range(40)), params, request_id="mine")
        await anext(stream)
        during = await engine.block_map(0, 4096)
        await stream.aclose()
        return during, await engine.block_map(100, 5)

    with AsyncEngine(tiny_config(max_model_len=512)) as engine:
        during, after = asyncio.run(main(engine))
        engine_of(engine).scheduler.check_integrity()
    assert {request.request_id for request in during.requests} <= {f"{i}:mine" for i in range(3)}
    assert during.requests
    assert (during.first_block, during.next_block, during.num_blocks) == (0, 128, 128)
    assert sum(block.ref_count > 0 for block in unfolded(during)) == sum(during.regions.used)
    assert (after.first_block, after.next_block, after.requests) == (100, 105, [])
    assert after.step >= during.step > 0


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (128, 1), (0, 0), (0, -1)])
def test_what_is_not_there(first: int, count: int) -> None:
    with AsyncEngine(tiny_config()) as engine, pytest.raises(InvalidRequestError):
        asyncio.run(engine.block_map(first, count))


def test_closed() -> None:
    with AsyncEngine(tiny_config()) as engine:
        pass
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.block_map(0, 1))
