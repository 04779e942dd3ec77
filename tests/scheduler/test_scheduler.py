"""Steps of small schedules, to the letter; blocks hold 4 tokens unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from rawpaged.request import FinishReason, RequestStatus
from rawpaged.scheduler.output import SchedulerOutput
from rawpaged.scheduler.scheduler import Scheduler
from tests.scheduler.harness import (
    EOS,
    Runner,
    make_config,
    make_group,
    make_request,
    next_token,
    shares,
    solo_run,
)


def sampling(output: SchedulerOutput) -> list[str]:
    return [scheduled.request_id for scheduled in output.scheduled if scheduled.samples]


def test_nothing_to_do() -> None:
    scheduler = Scheduler(make_config())
    assert scheduler.schedule() == SchedulerOutput((), ())
    assert scheduler.update(SchedulerOutput((), ()), {}) == []
    assert not scheduler.has_unfinished()


def test_prefill_and_decode_share_a_step() -> None:
    runner = Runner(make_config())
    a = runner.add(make_request("A", [0, 1, 2, 3, 4], max_tokens=3))
    output, _ = runner.step()
    assert shares(output) == [("A", 0, 5)]
    assert output.scheduled[0].block_table == (0, 1)
    runner.add(make_request("B", [4, 3, 2], max_tokens=1))
    output, finished = runner.step()
    assert shares(output) == [("A", 5, 1), ("B", 0, 3)]
    assert output.scheduled[0].token_ids == (a.token_ids[5],)
    assert sampling(output) == ["A", "B"]
    assert finished == ["B"]
    output, finished = runner.step()
    assert (shares(output), finished) == ([("A", 6, 1)], ["A"])
    assert a.output_token_ids == solo_run(a)[0]
    # The last token was sampled but never computed: nobody needs its KV.
    assert (a.num_tokens, a.num_computed_tokens) == (8, 7)


def test_chunked_prefill() -> None:
    runner = Runner(make_config(max_num_batched_tokens=6))
    runner.add(make_request("A", [1] * 4, max_tokens=4))
    runner.add(make_request("B", [2] * 9, max_tokens=2))
    steps = [runner.step()[0] for _ in range(4)]
    assert [shares(output) for output in steps] == [
        [("A", 0, 4), ("B", 0, 2)],
        [("A", 4, 1), ("B", 2, 5)],
        [("A", 5, 1), ("B", 7, 2)],
        [("A", 6, 1), ("B", 9, 1)],
    ]
    assert [sampling(output) for output in steps] == [["A"], ["A"], ["A", "B"], ["A", "B"]]
    assert not runner.scheduler.has_unfinished()


def test_budget_is_spent_in_order_of_arrival() -> None:
    runner = Runner(make_config(max_num_batched_tokens=2))
    for name in "ABC":
        runner.add(make_request(name, [1], max_tokens=3))
    steps = [shares(runner.step()[0]) for _ in range(4)]
    assert [[name for name, _, _ in step] for step in steps] == [["A", "B"]] * 3 + [["C"]]


def test_prefix_hit_skips_tokens_and_is_counted_once() -> None:
    runner = Runner(make_config())
    prompt = [0, 1, 2, 3, 4, 0, 1, 2]
    runner.add(make_request("A", prompt, max_tokens=1))
    runner.step()
    b = runner.add(make_request("B", [*prompt, 3], max_tokens=1))
    output, _ = runner.step()
    assert shares(output) == [("B", 8, 1)]
    assert output.scheduled[0].block_table[:2] == (0, 1)
    assert b.num_cached_tokens == 8
    scheduler = runner.scheduler
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (8 + 9, 8)
    assert (scheduler.num_prompt_tokens, scheduler.num_generation_tokens) == (8 + 1, 2)


def test_a_full_hit_computes_the_last_token_and_stores_nothing() -> None:
    runner = Runner(make_config())
    prompt = [0, 1, 2, 3, 4, 0, 1, 2]
    runner.add(make_request("A", prompt, max_tokens=1))
    runner.step()
    b = runner.add(make_request("B", prompt, max_tokens=2))
    output, _ = runner.step()
    assert shares(output) == [("B", 7, 1)]
    assert (output.scheduled[0].first_stored, output.scheduled[0].samples) == (8, True)
    assert (b.num_cached_tokens, b.num_computed_tokens) == (8, 8)
    assert shares(runner.step()[0]) == [("B", 8, 1)]
    assert b.output_token_ids == solo_run(b)[0]


def test_prompt_logprobs_compute_every_position() -> None:
    runner = Runner(make_config())
    runner.add(make_request("A", [1] * 9, max_tokens=1))
    runner.step()
    runner.add(make_request("B", [1] * 9, max_tokens=1, prompt_logprobs=1))
    assert shares(runner.step()[0]) == [("B", 0, 9)]
    assert runner.scheduler.prefix_cache_queries == 9


def test_the_last_running_request_is_preempted_and_resumes() -> None:
    runner = Runner(make_config(num_blocks=4, max_model_len=16, enable_prefix_caching=False))
    a = runner.add(make_request("A", [0] * 7, max_tokens=6))
    b = runner.add(make_request("B", [1] * 7, max_tokens=6))
    runner.step()
    assert runner.scheduler.num_used_blocks == 4
    runner.step()
    output, _ = runner.step()
    # Position 8 of A needs a third block: B gives up both of its own.
    assert (shares(output), output.preempted) == ([("A", 8, 1)], ("B",))
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert b.num_output_tokens == 2
    runner.add(make_request("C", [2], max_tokens=1))
    for _ in range(3):
        # B's nine tokens do not fit beside A. C would, but may not overtake.
        assert [name for name, _, _ in shares(runner.step()[0])] == ["A"]
    assert a.is_finished
    output, _ = runner.step()
    assert shares(output) == [("B", 0, 9), ("C", 0, 1)]
    runner.drain()
    for request in (a, b):
        assert (request.output_token_ids, request.finish_reason) == solo_run(request)[:2]
    assert runner.scheduler.num_preemptions == 1
    assert runner.scheduler.num_prompt_tokens == 7 + 7 + 7 + 1


def test_a_preempted_request_gets_its_own_blocks_back() -> None:
    runner = Runner(make_config(num_blocks=5, max_model_len=20))
    a = runner.add(make_request("A", [0] * 7, max_tokens=6))
    b = runner.add(make_request("B", [1] * 11, max_tokens=6))
    runner.step()
    runner.step()
    table_before = runner.scheduler.kv_cache_manager.block_table("B")
    output, _ = runner.step()
    assert output.preempted == ("B",)
    runner.scheduler.finish("A", FinishReason.ABORT)
    output, _ = runner.step()
    # Its last block was not full and went to A. The others need no recomputation.
    assert shares(output) == [("B", 8, 4)]
    assert output.scheduled[0].block_table[:2] == table_before[:2]
    assert b.num_cached_tokens == 0, "says what was found at first"
    assert a.num_preemptions == 0


def test_a_request_may_have_to_preempt_itself() -> None:
    runner = Runner(make_config(num_blocks=4, max_model_len=16, enable_prefix_caching=False))
    runner.add(make_request("A", [0] * 10, max_tokens=6))
    b = runner.add(make_request("B", [1] * 4, max_tokens=3))
    runner.step()
    output, _ = runner.step()
    assert (shares(output), output.preempted) == ([("A", 10, 1)], ("B",))
    assert b.status is RequestStatus.PREEMPTED
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason", "num_output_tokens"),
    [
        ({}, FinishReason.STOP, None, 2),
        ({"stop_token_ids": [EOS]}, FinishReason.STOP, None, 2),
        ({"ignore_eos": True}, FinishReason.LENGTH, None, 5),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, FinishReason.STOP, EOS, 2),
        ({"stop_token_ids": [3]}, FinishReason.STOP, 3, 1),
        ({"min_tokens": 2}, FinishReason.STOP, None, 2),
        ({"min_tokens": 3}, FinishReason.STOP, None, 4),
        ({"min_tokens": 5}, FinishReason.LENGTH, None, 5),
    ],
)
def test_stop_rules(
    params: dict[str, Any],
    reason: FinishReason,
    stop_reason: int | None,
    num_output_tokens: int,
) -> None:
    scheduler = Scheduler(make_config())
    request = make_request("A", [1], 5, eos_token_ids=frozenset([EOS]), **params)
    scheduler.add(request.group)
    for token_id in (3, EOS, 3, EOS, 3):
        finished = scheduler.update(scheduler.schedule(), {"A": token_id})
        if finished:
            break
    assert finished == [request]
    assert request.is_finished
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.num_output_tokens == num_output_tokens
    assert not scheduler.has_unfinished()
    assert scheduler.num_used_blocks == 0


def test_a_request_may_fill_max_model_len_to_the_last_token() -> None:
    runner = Runner(make_config(num_blocks=3, max_model_len=12))
    a = runner.add(make_request("A", [1] * 5, max_tokens=7))
    runner.drain()
    assert (a.num_tokens, a.finish_reason) == (12, FinishReason.LENGTH)


def test_finish_while_waiting_running_preempted_finished_and_unknown() -> None:
    runner = Runner(make_config(num_blocks=4, max_model_len=16))
    scheduler = runner.scheduler
    a = runner.add(make_request("A", [0] * 7, max_tokens=6))
    b = runner.add(make_request("B", [1] * 7, max_tokens=6))
    c = runner.add(make_request("C", [2] * 7, max_tokens=6))
    while b.status is not RequestStatus.PREEMPTED:
        runner.step()
    assert c.status is RequestStatus.WAITING
    assert scheduler.finish("B", FinishReason.ABORT) is b
    assert scheduler.finish("C", FinishReason.ERROR) is c
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    assert scheduler.finish("A", FinishReason.STOP, "###") is a
    assert (a.finish_reason, a.stop_reason, a.status) == (
        FinishReason.STOP,
        "###",
        RequestStatus.FINISHED,
    )
    assert scheduler.finish("A", FinishReason.ABORT) is None
    assert scheduler.finish("Z", FinishReason.ABORT) is None
    assert scheduler.num_used_blocks == 0
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()


def test_finish_between_schedule_and_update() -> None:
    runner = Runner(make_config())
    a = runner.add(make_request("A", [1, 2, 3], max_tokens=2))
    b = runner.add(make_request("B", [1, 2], max_tokens=2))
    output = runner.scheduler.schedule()
    runner.scheduler.finish("A", FinishReason.ERROR)
    # The next owner of the name has no part in the step.
    again = runner.add(make_request("A", [4], max_tokens=2))
    assert runner.scheduler.update(output, {"B": 0}) == []
    assert (a.num_tokens, b.num_tokens, again.num_tokens) == (3, 3, 1)
    runner.scheduler.check_integrity()


def test_a_step_without_update_is_scheduled_again() -> None:
    runner = Runner(make_config(max_num_batched_tokens=6))
    runner.add(make_request("A", [1] * 4, max_tokens=2))
    b = runner.add(make_request("B", [2] * 5, max_tokens=2))
    failed = runner.scheduler.schedule()
    runner.scheduler.finish("A", FinishReason.ERROR)
    output, _ = runner.step()
    assert shares(failed) == [("A", 0, 4), ("B", 0, 2)]
    assert shares(output) == [("B", 0, 5)]
    runner.drain()
    assert b.output_token_ids == solo_run(b)[0]


def test_finished_request_leaves_its_full_blocks_cached() -> None:
    runner = Runner(make_config())
    runner.add(make_request("A", [1] * 6, max_tokens=3))
    runner.drain()
    # Eight of nine tokens were computed: two full blocks.
    assert (runner.scheduler.num_used_blocks, runner.scheduler.num_cached_blocks) == (0, 2)
    runner.scheduler.reset_prefix_cache()
    assert runner.scheduler.num_cached_blocks == 0


def test_output_tokens_are_found_as_a_later_prompt() -> None:
    runner = Runner(make_config())
    a = runner.add(make_request("A", [1] * 6, max_tokens=7))
    runner.drain()
    b = runner.add(make_request("B", a.token_ids, max_tokens=1))
    runner.drain()
    assert b.num_cached_tokens == 12
    assert b.output_token_ids == [next_token(a.token_ids)]


def test_samples_share_the_prompt_that_the_first_computes() -> None:
    runner = Runner(make_config())
    samples = runner.add_group(make_group("A", 3, [0, 1, 2, 3, 4, 0], max_tokens=3))
    runner.add(make_request("B", [4], max_tokens=2))
    output, _ = runner.step()
    assert shares(output) == [("A0", 0, 6), ("A1", 5, 1), ("A2", 5, 1), ("B", 0, 1)]
    assert [s.first_stored for s in output.scheduled] == [0, 6, 6, 0]
    assert [s.block_table for s in output.scheduled] == [(0, 1), (0, 1), (0, 1), (2,)]
    assert output.block_copies == ()
    output, _ = runner.step()
    assert shares(output) == [("A0", 6, 1), ("A1", 6, 1), ("A2", 6, 1), ("B", 1, 1)]
    assert [s.block_table for s in output.scheduled] == [(0, 3), (0, 4), (0, 1), (2,)]
    assert output.block_copies == ((1, 3), (1, 4))
    runner.drain()
    for sample in samples:
        assert sample.output_token_ids == solo_run(sample)[0]
    assert len({tuple(sample.token_ids) for sample in samples}) > 1
    # The prompt was computed once.
    assert runner.scheduler.num_prompt_tokens == 6 + 1
    assert runner.scheduler.kv_cache_manager.num_forks == 2


def test_samples_wait_for_a_prompt_in_chunks_and_hold_up_nobody() -> None:
    runner = Runner(make_config(max_num_batched_tokens=4))
    runner.add(make_request("B", [4], max_tokens=4))
    runner.step()
    runner.add_group(make_group("A", 3, [0] * 10, max_tokens=3))
    runner.add(make_request("C", [5], max_tokens=1))
    steps = [shares(runner.step()[0]) for _ in range(4)]
    assert steps == [
        [("B", 1, 1), ("A0", 0, 3)],
        [("B", 2, 1), ("A0", 3, 3)],
        [("B", 3, 1), ("A0", 6, 3)],
        [("A0", 9, 1), ("A1", 9, 1), ("A2", 9, 1), ("C", 0, 1)],
    ]


def test_samples_that_end_at_once_share_the_prompt_all_the_same() -> None:
    runner = Runner(make_config(enable_prefix_caching=False))
    runner.add_group(make_group("A", 4, [0] * 11, max_tokens=1))
    output, finished = runner.step()
    assert [len(s.token_ids) for s in output.scheduled] == [11, 1, 1, 1]
    assert finished == ["A0", "A1", "A2", "A3"]


def test_a_sample_whose_siblings_are_gone_starts_by_itself() -> None:
    runner = Runner(make_config(max_num_seqs=1, enable_prefix_caching=False))
    runner.add_group(make_group("A", 2, [0, 1, 2, 3, 4], max_tokens=1))
    assert shares(runner.step()[0]) == [("A0", 0, 5)]
    assert shares(runner.step()[0]) == [("A1", 0, 5)]


def test_one_sample_computes_every_position_for_prompt_logprobs() -> None:
    runner = Runner(make_config())
    runner.add(make_request("B", [1] * 9, max_tokens=1))
    runner.step()
    runner.add_group(make_group("A", 2, [1] * 9, max_tokens=2, prompt_logprobs=1))
    assert shares(runner.step()[0]) == [("A0", 0, 9), ("A1", 8, 1)]
    assert shares(runner.step()[0]) == [("A0", 9, 1), ("A1", 9, 1)]


def test_samples_of_a_preempted_group_share_again() -> None:
    config = make_config(
        num_blocks=8, max_model_len=28, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    runner = Runner(config)
    a = runner.add(make_request("A", [0] * 11, max_tokens=9))
    b0, b1 = runner.add_group(make_group("B", 2, [1] * 8, max_tokens=9))
    while b0.status is not RequestStatus.PREEMPTED:
        runner.step()
    assert b1.status is RequestStatus.PREEMPTED
    while not a.is_finished:
        runner.step()
    output, _ = runner.step()
    # B1 has the prompt and whatever output is equal from its sibling, and computes its own.
    (first, (_, start, num_tokens)) = shares(output)
    assert first == ("B0", 0, b0.num_tokens - 1)
    assert start >= 8
    assert start + num_tokens == b1.num_tokens - 1
    runner.drain()
    for request in (a, b0, b1):
        assert request.output_token_ids == solo_run(request)[0]


def test_a_group_alone_gives_way_from_its_last_sample() -> None:
    """Three samples of 16 tokens do not fit four blocks, but each does."""
    runner = Runner(make_config(num_blocks=4, max_model_len=16, enable_prefix_caching=False))
    samples = runner.add_group(make_group("A", 3, [0] * 6, max_tokens=10))
    preempted: list[str] = []
    for _ in range(100):
        output, _ = runner.step()
        preempted += output.preempted
        if not runner.scheduler.has_unfinished():
            break
    assert preempted
    assert "A0" not in preempted
    for sample in samples:
        assert sample.output_token_ids == solo_run(sample)[0]
