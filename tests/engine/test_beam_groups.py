"""Beam search in the engine: many searches and other requests in one batch, blocks shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rawpaged.engine.launched_step import StepResult
from rawpaged.engine.sampler import NO_TOKEN
from rawpaged.request import FinishReason, Request, RequestGroup
from tests.engine.beams import CASES, assert_golden, run_searches, search, search_of
from tests.engine.helpers import request, run, tiny_engine

PROMPT = [(7 * i) % 320 for i in range(40)]


@pytest.mark.parametrize(
    "engine_params",
    [
        {"num_blocks": 400, "max_num_seqs": 64},
        {"num_blocks": 18, "max_num_seqs": 16, "max_num_batched_tokens": 19},
    ],
    ids=["roomy", "narrow"],
)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_golden_searches_at_once(model: str, engine_params: dict[str, int]) -> None:
    """As transformers finds them, whatever else runs: all together, and where they preempt."""
    cases = [case for case in CASES if case["model"] == model]
    engine = tiny_engine(model, **engine_params)  # type: ignore[arg-type]
    found = run_searches(engine, [search_of(case, str(i)) for i, case in enumerate(cases)])
    for i, case in enumerate(cases):
        assert_golden(found[f"{i}-0"], case, rel=1e-4)
    if engine_params["num_blocks"] == 18:
        assert engine.scheduler.num_preemptions > 0
    engine.close()


def mixed() -> tuple[list[RequestGroup], list[Request]]:
    """Searches of several widths, some with a common prefix, and requests that sample."""
    groups = [
        search("a", PROMPT, n=4, max_tokens=30),
        search("b", PROMPT[:33], n=2, max_tokens=20, stop_token_ids=[11, 12, 13]),
        search("c", PROMPT[::-1], n=7, max_tokens=25, length_penalty=0.0, early_stopping="never"),
        search("d", [5], n=1, max_tokens=12),
    ]
    others = [
        request("x", PROMPT, max_tokens=40),
        request("y", PROMPT[5:], max_tokens=30, temperature=1.0, seed=3),
    ]
    return groups, others


@pytest.mark.parametrize(
    "engine_params",
    [
        {"num_blocks": 300},
        {"num_blocks": 24, "max_num_batched_tokens": 23},
        {"num_blocks": 24, "max_num_seqs": 13, "enable_prefix_caching": False},
        {"num_blocks": 24, "num_host_blocks": 60},
        {"num_blocks": 24, "num_host_blocks": 12, "max_num_batched_tokens": 23},
    ],
    ids=str,
)
def test_company_changes_nothing(engine_params: dict[str, Any]) -> None:
    """Each search and each other request says alone, to the last bit, what it says in company."""
    alone: dict[str, Any] = {}
    for name in range(4):
        engine = tiny_engine(max_num_batched_tokens=128, enable_prefix_caching=False)
        alone |= run_searches(engine, [mixed()[0][name]])
        engine.close()
    engine = tiny_engine()
    tokens = {each.request_id: run(engine, [each])[each.request_id] for each in mixed()[1]}
    engine.close()
    engine = tiny_engine(**engine_params)
    groups, others = mixed()
    assert run_searches(engine, groups, others) == alone
    assert {each.request_id: each.output_token_ids for each in others} == tokens
    stats = engine.scheduler.kv_stats()
    assert (stats.num_preemptions > 0) == (engine_params["num_blocks"] < 300)
    assert (stats.num_swap_preemptions > 0) == ("num_host_blocks" in engine_params)
    assert stats.num_used_host_blocks == 0
    engine.close()


@pytest.mark.parametrize("num_steps", range(8))
def test_aborted_at_any_step(num_steps: int) -> None:
    """What was found so far is told, and no block is left."""
    engine = tiny_engine(num_blocks=40, max_num_batched_tokens=20)
    group = search("a", PROMPT, n=3, max_tokens=30)
    engine.add_group(group)
    requests = list(group.requests)
    for _ in range(num_steps):
        engine.step()
    output = engine.finish("a-1", FinishReason.ABORT)
    assert output is not None
    assert output.beams is not None
    assert all(beam.finish_reason is FinishReason.ABORT for beam in output.beams)
    num_tokens = max(0, num_steps - 1)  # two steps compute the prompt
    assert [len(b.hypothesis.tokens) for b in output.beams] == [num_tokens] * 3 * (num_tokens > 0)
    assert engine.finish("a-0", FinishReason.ABORT) is None
    assert not engine.has_unfinished()
    engine.scheduler.check_integrity()
    assert engine.scheduler.num_used_blocks == 0
    assert all(each.is_finished for each in requests)
    engine.close()


def test_a_search_that_is_aborted_has_no_final_outputs() -> None:
    """What has ended by then might not be among the best, so its reason is the abort too."""
    case = next(case for case in CASES if len(case["beams"][0]["token_ids"]) == 2)
    engine = tiny_engine(case["model"])
    engine.add_group(search_of(case, "a"))
    for _ in range(4):
        engine.step()
    output = engine.finish("a-0", FinishReason.ABORT)
    engine.close()
    assert output is not None
    assert output.beams is not None
    assert [beam.hypothesis.is_ended for beam in output.beams] == [True, False]
    assert output.beams[0].hypothesis.token_ids == case["beams"][0]["token_ids"]
    assert {beam.finish_reason for beam in output.beams} == {FinishReason.ABORT}


def test_broken_logits_of_a_beam_end_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one, with an error; another search in the same step goes on."""
    engine = tiny_engine()
    engine.add_group(search("a", PROMPT, n=3))
    engine.add_group(search("b", PROMPT, n=2))
    for _ in range(4):
        engine.step()
    result_of = engine.runner.result

    def broken(*args: Any) -> StepResult:
        result = result_of(*args)
        token = result.sampled["a-1"]._replace(token_id=NO_TOKEN)
        return replace(result, sampled={**result.sampled, "a-1": token})

    monkeypatch.setattr(engine.runner, "result", broken)
    (output,) = engine.step()
    monkeypatch.undo()
    assert output.request_id == "a-0"
    assert "not finite" in (output.error or "")
    engine.scheduler.check_integrity()
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["b-0"]
    assert engine.scheduler.num_used_blocks == 0
    engine.close()


def test_a_failed_step_ends_the_search_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    engine.add_group(search("a", PROMPT, n=3))
    engine.step()
    engine.step()

    def fail(*args: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(engine.runner, "launch_forward", fail)
    (output,) = engine.step()
    assert output.request_id == "a-0"
    assert output.error is not None
    assert not engine.has_unfinished()
    assert engine.scheduler.num_used_blocks == 0
    engine.close()
