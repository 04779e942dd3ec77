"""Preemption by copies to the host and back, to the letter; blocks hold 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rawpaged.config import PreemptionCosts, SchedulerConfig
from rawpaged.errors import ConfigError
from rawpaged.request import FinishReason, Request, RequestStatus
from rawpaged.scheduler.output import SchedulerOutput
from rawpaged.scheduler.preemption import is_swap_cheaper
from tests.scheduler.harness import Runner, make_config, make_group, make_request, shares, solo_run


def swapping_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 4,
        "max_model_len": 16,
        "num_host_blocks": 8,
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
    }
    return make_config(**{**values, **changes})


def run_until_preempted(runner: Runner) -> SchedulerOutput:
    for _ in range(20):
        output, _ = runner.step()
        if output.preempted:
            return output
    raise AssertionError("nobody was preempted")


def crowd(**changes: Any) -> tuple[Runner, Request, Request]:
    """A and B, of which B has to give way once A needs its third block."""
    runner = Runner(swapping_config(**changes))
    a = runner.add(make_request("A", [0] * 7, max_tokens=6))
    b = runner.add(make_request("B", [1] * 7, max_tokens=6))
    return runner, a, b


def test_out_and_in_again() -> None:
    runner, a, b = crowd()
    table = runner.step()[0].scheduled[1].block_table
    output = run_until_preempted(runner)
    assert (output.preempted, output.swapped) == (("B",), ("B",))
    assert output.swap_out == ((table[0], 0), (table[1], 1))
    assert output.swap_in == ()
    assert output.request_ids == ("A", "B")
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.SWAPPED, 8, 1)
    assert runner.scheduler.swap_space.host_table("B") == (0, 1)
    while not a.is_finished:
        assert runner.step()[0].swap_in == ()
    output, _ = runner.step()
    # It goes on where it was: nothing is computed twice.
    assert shares(output) == [("B", 8, 1)]
    assert [source for source, _ in output.swap_in] == [0, 1]
    assert output.swapped == ("B",)
    assert output.scheduled[0].block_table[:2] == tuple(target for _, target in output.swap_in)
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]
    stats = runner.scheduler.kv_stats()
    assert (stats.num_preemptions, stats.num_swap_preemptions) == (1, 1)
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (2, 2)
    assert runner.scheduler.num_prompt_tokens == 7 + 7


def test_what_is_still_cached_is_not_copied_back() -> None:
    runner, _, b = crowd(num_blocks=5, max_model_len=20, enable_prefix_caching=True)
    b.max_tokens = 9
    run_until_preempted(runner)
    runner.scheduler.finish("A", FinishReason.ABORT)
    output, _ = runner.step()
    assert output.scheduled[0].request_id == "B"
    stats = runner.scheduler.kv_stats()
    assert stats.num_swapped_out_blocks > stats.num_swapped_in_blocks == len(output.swap_in)
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]


def test_too_small_a_swap_space_means_computing_again() -> None:
    runner, _, b = crowd(num_host_blocks=1)
    output = run_until_preempted(runner)
    assert (output.preempted, output.swapped, output.swap_out) == (("B",), (), ())
    assert (b.status, b.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]


def test_a_group_goes_as_a_whole_and_keeps_what_it_shares() -> None:
    runner = Runner(swapping_config(num_blocks=8, max_model_len=32, num_host_blocks=4))
    a = runner.add(make_request("A", [0] * 11, max_tokens=9))
    samples = runner.add_group(make_group("B", 2, [1] * 10, max_tokens=9))
    output = run_until_preempted(runner)
    while "B0" not in output.preempted:
        output = run_until_preempted(runner)
    if len(output.swapped) == 2:
        tables = [runner.scheduler.swap_space.host_table(name) for name in ("B0", "B1")]
        assert tables[0][:2] == tables[1][:2]
        assert len(output.swap_out) == len({b for table in tables for b in table}) == 4
    while not a.is_finished:
        runner.step()
    runner.drain()
    for sample in samples:
        assert sample.output_token_ids == solo_run(sample)[0]


def test_abort_gives_host_blocks_back() -> None:
    runner, _, b = crowd()
    run_until_preempted(runner)
    pool = runner.scheduler.swap_space.block_pool
    assert pool.num_used_blocks == 2
    assert runner.scheduler.finish("B", FinishReason.ABORT) is b
    assert pool.num_used_blocks == 0
    runner.scheduler.check_integrity()


def test_nobody_overtakes_what_waits_for_room() -> None:
    runner, a, b = crowd()
    run_until_preempted(runner)
    runner.add(make_request("C", [2], max_tokens=1))
    while not a.is_finished:
        assert [name for name, _, _ in shares(runner.step()[0])] == ["A"]
    assert [name for name, _, _ in shares(runner.step()[0])] == ["B", "C"]
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]


def test_samples_that_do_not_fit_together_come_back_one_by_one() -> None:
    """Swapped out by A with all the pool's blocks, they need one more for what they write next."""
    runner = Runner(
        swapping_config(num_blocks=5, max_model_len=20, num_host_blocks=5, max_num_seqs=8)
    )
    samples = runner.add_group(make_group("B", 4, [1] * 5, max_tokens=11))
    runner.drain()
    for sample in samples:
        assert sample.output_token_ids == solo_run(sample)[0]


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "is_cheaper"),
    [(1, 16, True), (8, 128, True), (2, 4, False), (1, 2, False), (1, 3, True)],
)
def test_auto_compares_times(num_blocks: int, num_tokens: int, is_cheaper: bool) -> None:
    costs = PreemptionCosts(block_copy_seconds=0.001, token_seconds=0.001)
    assert is_swap_cheaper(costs, num_blocks, num_tokens) == is_cheaper


@pytest.mark.parametrize(("block_copy_seconds", "is_swapped"), [(1.0, False), (0.001, True)])
def test_auto(block_copy_seconds: float, is_swapped: bool) -> None:
    costs = PreemptionCosts(block_copy_seconds, token_seconds=0.01)
    runner, _, b = crowd(preemption_mode="auto", preemption_costs=costs)
    output = run_until_preempted(runner)
    assert bool(output.swap_out) == is_swapped
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"preemption_mode": "swap", "num_host_blocks": 0},
        {"preemption_mode": "recompute"},
        {"preemption_mode": "auto"},
        {"preemption_costs": PreemptionCosts(1.0, 1.0)},
        {"preemption_mode": "never"},
    ],
)
def test_settings_at_odds(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="preemption_mode="):
        swapping_config(**changes)
