"""Swapping through the engine: start, costs, and steps that fail between the copies."""

from __future__ import annotations

from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine.preemption_costs import measure_costs
from rawpaged.scheduler.output import SchedulerOutput
from tests.engine.helpers import poison_free_blocks, request, run, samples, tiny_engine
from tests.tiny import engine_of, tiny_config

PROMPTS = [[(11 * i + j) % 320 for j in range(30)] for i in range(6)]


def crowded(engine: Any) -> list[Any]:
    """Groups that do not fit together."""
    groups = [
        samples(str(i), 1 + i % 3, prompt, max_tokens=30, temperature=1.0, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    return [each for group in groups for each in group]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("copies", ["swap_out", "swap_in", "block_copies"])
def test_a_step_that_fails_with_its_copies(
    when: str, copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All whose blocks it copied fail, also those it did not schedule; the others are unharmed."""
    expected = run(tiny_engine(), crowded(None))
    engine = tiny_engine(num_blocks=12, num_host_blocks=40)
    launch_forward = engine.runner.launch_forward
    lost: list[str] = []

    def fail_once(output: SchedulerOutput, requests: Any) -> Any:
        if getattr(output, copies) and not lost:
            lost.extend(output.request_ids)
            if when == "after":
                launch_forward(output, requests)
            raise RuntimeError("the device is gone")
        return launch_forward(output, requests)

    monkeypatch.setattr(engine.runner, "launch_forward", fail_once)
    requests = crowded(engine)
    for group in dict.fromkeys(each.group for each in requests):
        engine.add_group(group)
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    failed = []
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                failed.append(output.request_id)
            elif output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        engine.scheduler.check_integrity()
        poison_free_blocks(engine)
    assert failed == lost != []
    for name, sampled in tokens.items():
        if name in failed:
            assert sampled == expected[name][: len(sampled)]
        else:
            assert sampled == expected[name]
    assert engine.scheduler.num_used_blocks == 0
    assert engine.scheduler.swap_space.block_pool.num_used_blocks == 0


def test_copies_are_made_though_nothing_is_computed() -> None:
    """In a step in which all who could run wait for each other."""
    runner = tiny_engine(num_host_blocks=4).runner
    (cache, *_), (host, *_) = runner.kv_caches, runner.host_kv_caches
    cache.keys[2], cache.values[2] = 7, 8
    runner.execute(SchedulerOutput((), (), swap_out=((2, 1),), swapped=("a",)), {})
    assert (host.keys[1] == 7).all()
    assert (host.values[1] == 8).all()
    runner.execute(SchedulerOutput((), (), swap_in=((1, 3),), swapped=("a",)), {})
    assert (cache.keys[3] == 7).all()
    assert (cache.values[3] == 8).all()


def test_costs_are_times() -> None:
    engine = tiny_engine(num_host_blocks=7)
    costs = measure_costs(engine.runner)
    assert 0 < costs.block_copy_seconds < 10
    assert 0 < costs.token_seconds < 10
    # What the first blocks hold now is garbage that nobody reads.
    prompt = list(range(40))
    assert run(engine, [request("a", prompt)]) == run(tiny_engine(), [request("a", prompt)])


@pytest.mark.parametrize("mode", ["swap", "auto", None])
def test_from_the_flags_on(mode: str | None) -> None:
    """Output equals that of a roomy engine; with "swap" blocks have gone out and come back."""
    params = [
        SamplingParams(n=2, max_tokens=60, seed=i, ignore_eos=True, logprobs=1) for i in range(6)
    ]
    with LLM(tiny_config()) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    small = tiny_config(
        num_gpu_blocks_override=14, max_model_len=160, swap_space=0.01, preemption_mode=mode
    )
    with LLM(small) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs for output in outputs] == expected
        stats = llm.kv_stats()
        assert stats.num_preemptions > 0
        assert stats.num_host_blocks > 14
        assert stats.num_used_host_blocks == stats.num_used_blocks == 0
        if mode == "swap":
            assert stats.num_swap_preemptions > 0
            assert stats.num_swapped_in_blocks > 0
        runner = engine_of(llm).runner
        host = runner.host_kv_caches[0]
        assert (host.keys.dtype, host.keys.shape[1:]) == (
            runner.kv_caches[0].keys.dtype,
            runner.kv_caches[0].keys.shape[1:],
        )
