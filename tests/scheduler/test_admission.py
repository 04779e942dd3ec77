"""Who starts, and when; blocks hold 4 tokens unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from rawpaged.errors import InvalidRequestError
from rawpaged.request import FinishReason
from rawpaged.scheduler.scheduler import Scheduler
from tests.scheduler.harness import (
    Runner,
    make_config,
    make_group,
    make_request,
    shares,
    solo_beams,
    solo_run,
)


def test_max_num_seqs_limits_running_requests() -> None:
    runner = Runner(make_config(max_num_seqs=2))
    for name, max_tokens in (("A", 2), ("B", 1), ("C", 1)):
        runner.add(make_request(name, [1], max_tokens))
    output, finished = runner.step()
    assert (shares(output), finished) == ([("A", 0, 1), ("B", 0, 1)], ["B"])
    assert (runner.scheduler.num_running, runner.scheduler.num_waiting) == (1, 1)
    output, _ = runner.step()
    assert shares(output) == [("A", 1, 1), ("C", 0, 1)]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    runner = Runner(make_config(num_blocks=4, max_model_len=16, enable_prefix_caching=False))
    runner.add(make_request("A", [0] * 10, max_tokens=6))
    runner.add(make_request("B", [1] * 4, max_tokens=3))
    runner.step()
    runner.add(make_request("C", [2], max_tokens=1))
    output, _ = runner.step()
    assert (shares(output), output.preempted) == ([("A", 10, 1)], ("B",))


def test_admission_needs_room_for_the_whole_prompt() -> None:
    runner = Runner(make_config(num_blocks=4, max_model_len=16, max_num_batched_tokens=8))
    runner.add(make_request("A", [0] * 4, max_tokens=2))
    b = runner.add(make_request("B", [1] * 14, max_tokens=1))
    # B's chunk of four tokens would fit, its prompt does not.
    assert shares(runner.step()[0]) == [("A", 0, 4)]
    assert shares(runner.step()[0]) == [("A", 4, 1)]
    assert shares(runner.step()[0]) == [("B", 0, 8)]
    runner.drain()
    assert b.num_preemptions == 0


def test_a_waiting_request_is_not_overtaken() -> None:
    runner = Runner(make_config(num_blocks=4, max_model_len=16))
    runner.add(make_request("A", [0] * 6, max_tokens=2))
    runner.add(make_request("B", [1] * 12, max_tokens=1))
    runner.add(make_request("C", [2], max_tokens=1))
    order = [[name for name, _, _ in shares(runner.step()[0])] for _ in range(3)]
    assert order == [["A"], ["A"], ["B", "C"]]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [([], 4, "prompt"), ([1] * 37, 4, "max_tokens"), ([1] * 40, 1, "max_tokens")],
)
def test_requests_that_can_never_fit_are_refused(
    prompt: list[int], max_tokens: int, param: str
) -> None:
    scheduler = Scheduler(make_config())
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_request("A", prompt, max_tokens).group)
    assert caught.value.param == param
    assert not scheduler.has_unfinished()


def test_request_ids_are_unique_among_unfinished_requests() -> None:
    runner = Runner(make_config())
    runner.add(make_request("A", [1], max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'A' is in use"):
        runner.add(make_request("A", [2]))
    runner.drain()
    runner.add(make_request("A", [2], max_tokens=1))
    runner.drain()


def test_more_samples_than_seats_run_in_turns() -> None:
    runner = Runner(make_config(max_num_seqs=2))
    samples = runner.add_group(make_group("A", 5, [0, 1, 2, 3, 4, 0], max_tokens=3))
    names = [[name for name, _, _ in shares(runner.step()[0])] for _ in range(7)]
    assert names == [["A0", "A1"]] * 3 + [["A2", "A3"]] * 3 + [["A4"]]
    runner.drain()
    for sample in samples:
        assert sample.output_token_ids == solo_run(sample)[0]


def test_a_long_prompt_holds_up_nobody() -> None:
    """Its chunks take what the single tokens leave, whoever came first."""
    runner = Runner(make_config(num_blocks=60, max_model_len=100, max_num_batched_tokens=8))
    runner.add(make_request("A", [0, 1, 2], max_tokens=20))
    runner.add(make_request("B", [1, 2], max_tokens=20))
    runner.step()
    runner.add(make_request("C", [2] * 60, max_tokens=2))
    runner.add(make_request("D", [3], max_tokens=2))
    while True:
        output, _ = runner.step()
        assert shares(output)[:2] == [
            (name, runner.requests[name].num_computed_tokens - 1, 1) for name in "AB"
        ]
        if output.scheduled[-1].samples:
            break
        assert len(output.scheduled[-1].token_ids) == 6
    assert runner.requests["C"].num_computed_tokens == 60


def test_younger_requests_decode_while_an_older_prompt_is_computed() -> None:
    runner = Runner(make_config(num_blocks=60, max_model_len=100, max_num_batched_tokens=8))
    runner.add(make_request("A", [2] * 30, max_tokens=2))
    runner.step()
    runner.add(make_request("B", [1], max_tokens=4))
    # B starts once A leaves some of the budget, and is not held up by another long prompt.
    runner.add(make_request("C", [4] * 30, max_tokens=2))
    steps = [shares(runner.step()[0]) for _ in range(5)]
    assert steps == [
        [("A", 8, 8)],
        [("A", 16, 8)],
        [("A", 24, 6), ("B", 0, 1), ("C", 0, 1)],
        [("A", 30, 1), ("B", 1, 1), ("C", 1, 6)],
        [("B", 2, 1), ("C", 7, 7)],
    ]


def test_groups_are_added_whole_or_not_at_all() -> None:
    runner = Runner(make_config())
    runner.add(make_request("A1", [1], max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'A1' is in use"):
        runner.add_group(make_group("A", 2, [1]))
    assert runner.scheduler.num_waiting == 1


def test_requests_in_lockstep() -> None:
    runner = Runner(make_config(max_num_seqs=3))
    beams = runner.add_group(make_group("A", 2, [0, 1, 2, 3, 4, 0], max_tokens=3, lockstep=True))
    runner.add_group(make_group("B", 2, [1], max_tokens=3, lockstep=True))
    runner.add(make_request("C", [1], max_tokens=1))
    # All of A has its seats from the start, which leaves one: too few for B, and C waits its turn.
    assert shares(runner.step()[0]) == [("A0", 0, 6)]
    assert runner.scheduler.num_running == 2
    assert shares(runner.step()[0]) == [("A0", 6, 1), ("A1", 6, 1)]
    assert shares(runner.step()[0]) == [("A0", 7, 1), ("A1", 7, 1)]
    assert [beam.is_finished for beam in beams] == [True, True]
    assert [beam.token_ids for beam in beams] == solo_beams([0, 1, 2, 3, 4, 0], 2, 3)
    assert shares(runner.step()[0]) == [("B0", 0, 1), ("C", 0, 1)]
    runner.drain()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_num_seqs": 2}, "n=3 beams are more than max_num_seqs=2"),
        ({"max_num_batched_tokens": 2}, "n=3 beams are more than max_num_batched_tokens=2"),
        ({}, "n=3 beams .* may need 13 KV blocks of 4 tokens, and the pool has 10"),
    ],
)
def test_beams_that_can_never_run_together_are_refused(
    changes: dict[str, int], complaint: str
) -> None:
    scheduler = Scheduler(make_config(**changes))
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        scheduler.add(make_group("A", 3, [1] * 6, max_tokens=14, lockstep=True))
    assert caught.value.param == "n"


def test_lower_priorities_start_first_and_among_equals_the_older() -> None:
    config = make_config(max_num_seqs=1, scheduling_policy="priority")
    runner = Runner(config)
    for name, priority in (("A", 2), ("B", 0), ("C", -1), ("D", 0)):
        runner.add_group(make_group(name, 1, [1], max_tokens=1, priority=priority))
    order = [shares(runner.step()[0])[0][0] for _ in range(4)]
    assert order == ["C0", "B0", "D0", "A0"]


def test_the_worst_priority_gives_way() -> None:
    runner = Runner(
        make_config(
            num_blocks=4,
            max_model_len=16,
            enable_prefix_caching=False,
            scheduling_policy="priority",
        )
    )
    (a,) = runner.add_group(make_group("A", 1, [0] * 7, max_tokens=6, priority=1))
    (b,) = runner.add_group(make_group("B", 1, [1] * 7, max_tokens=6, priority=0))
    runner.step()
    preempted: tuple[str, ...] = ()
    while not preempted:
        preempted = runner.step()[0].preempted
    assert preempted == ("A0",)
    runner.drain()
    for request in (a, b):
        assert request.output_token_ids == solo_run(request)[0]


def test_whoever_runs_is_not_preempted_for_a_better_priority() -> None:
    config = make_config(max_num_seqs=1, scheduling_policy="priority")
    runner = Runner(config)
    runner.add_group(make_group("A", 1, [1], max_tokens=3, priority=5))
    runner.step()
    runner.add_group(make_group("B", 1, [1], max_tokens=1, priority=0))
    assert [shares(runner.step()[0])[0][0] for _ in range(3)] == ["A0", "A0", "B0"]


def test_priorities_need_their_policy() -> None:
    scheduler = Scheduler(make_config())
    with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as caught:
        scheduler.add(make_group("A", 1, [1], priority=1))
    assert caught.value.param == "priority"


def test_the_watermark_keeps_blocks_for_those_that_run() -> None:
    runner = Runner(make_config(num_blocks=6, max_model_len=24, num_watermark_blocks=2))
    # Alone anybody may have all the blocks.
    runner.add(make_request("A", [0] * 11, max_tokens=13))
    runner.step()
    runner.add(make_request("B", [1] * 7, max_tokens=1))
    # Three blocks are unused. B would take two and leave one.
    while runner.requests["A"].num_tokens < 24:
        assert [name for name, _, _ in shares(runner.step()[0])] == ["A"]
    assert [name for name, _, _ in shares(runner.step()[0])] == ["B"]


def test_without_a_watermark_the_same_start_preempts() -> None:
    runner = Runner(make_config(num_blocks=6, max_model_len=24))
    runner.add(make_request("A", [0] * 11, max_tokens=13))
    runner.step()
    runner.add(make_request("B", [1] * 7, max_tokens=6))
    assert [name for name, _, _ in shares(runner.step()[0])] == ["A", "B"]
    runner.drain()
    assert runner.scheduler.num_preemptions > 0


def test_groups_are_queued_until_one_of_them_has_run() -> None:
    runner = Runner(make_config(max_num_seqs=1))
    scheduler = runner.scheduler
    runner.add_group(make_group("A", 3, [1], max_tokens=1))
    runner.add_group(make_group("B", 2, [2], max_tokens=1))
    runner.add_group(make_group("C", 2, [3], max_tokens=1))
    assert scheduler.num_queued_groups == 3
    runner.step()
    assert (scheduler.num_queued_groups, scheduler.num_waiting) == (2, 6)
    for name in ("B0", "B1"):
        scheduler.finish(name, FinishReason.ABORT)
    assert scheduler.num_queued_groups == 1
    runner.drain()
    assert scheduler.num_queued_groups == 0


def test_equal_prompts_are_computed_once() -> None:
    runner = Runner(make_config(max_num_batched_tokens=8))
    prompt = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    for name in "AB":
        runner.add(make_request(name, prompt, max_tokens=2))
    runner.add(make_request("C", [*prompt[:5], 0, 0, 0], max_tokens=1))
    runner.add(make_request("D", [5], max_tokens=1))
    assert shares(runner.step()[0]) == [("A", 0, 8)]
    # B has all that A has computed, C its first block; nobody waits for blocks that are not full.
    steps = [shares(runner.step()[0]) for _ in range(2)]
    assert steps == [
        [("A", 8, 2), ("B", 8, 2), ("C", 4, 4)],
        [("A", 10, 1), ("B", 10, 1), ("D", 0, 1)],
    ]
    assert runner.scheduler.prefix_cache_hits == 8 + 4


def test_whoever_waits_for_a_prefix_is_passed_over() -> None:
    runner = Runner(make_config())
    for name, prompt in (("A", [0] * 9), ("B", [0] * 9), ("C", [5])):
        runner.add(make_request(name, prompt, max_tokens=2))
    assert shares(runner.step()[0]) == [("A", 0, 9), ("C", 0, 1)]
    assert shares(runner.step()[0]) == [("A", 9, 1), ("C", 1, 1), ("B", 8, 1)]


def test_a_step_passes_over_a_bounded_number() -> None:
    runner = Runner(make_config(max_num_seqs=2))
    for name in "ABCD":
        runner.add(make_request(name, [0] * 9, max_tokens=1))
    runner.add(make_request("E", [5], max_tokens=1))
    # A seat and budget are left, but E is behind 2 * max_num_seqs others.
    assert shares(runner.step()[0]) == [("A", 0, 9)]
    assert shares(runner.step()[0]) == [("B", 8, 1), ("C", 8, 1)]
    assert shares(runner.step()[0]) == [("D", 8, 1), ("E", 0, 1)]


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_nobody_waits_for_a_prefix_that_will_not_come(how: str) -> None:
    runner = Runner(make_config(max_num_batched_tokens=8))
    for name in "AB":
        runner.add(make_request(name, [0] * 16, max_tokens=2))
    assert shares(runner.step()[0]) == [("A", 0, 8)]
    if how == "abort":
        runner.scheduler.finish("A", FinishReason.ABORT)
        assert shares(runner.step()[0]) == [("B", 8, 8)]
    else:
        runner.scheduler.reset_prefix_cache()
        assert shares(runner.step()[0]) == [("A", 8, 8)]
        assert shares(runner.step()[0]) == [("A", 16, 1), ("B", 0, 7)]


@pytest.mark.parametrize(
    "options", [{"cache_keys": ("salt",)}, {"skip_reading_prefix_cache": True}]
)
def test_nobody_waits_for_a_prefix_that_it_will_not_read(options: dict[str, Any]) -> None:
    runner = Runner(make_config(max_num_batched_tokens=32))
    runner.add(make_request("A", [0] * 9, max_tokens=2))
    runner.add(make_request("B", [0] * 9, max_tokens=2, **options))
    assert shares(runner.step()[0]) == [("A", 0, 9), ("B", 0, 9)]
