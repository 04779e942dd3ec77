"""Sleeping on the CPU: memory that is really given back, and answers that stay as they were."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine import loading
from rawpaged.errors import (
    BackendError,
    CheckpointError,
    EngineClosedError,
    EngineSleepingError,
    InvalidRequestError,
    SleepError,
)
from tests.tiny import LLAMA, engine_of, tiny_config, wait_until

PROMPTS = [list(range(3, 40)), [5, 6, 7]]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=1, logprobs=3)


def answers(llm: LLM) -> list[Any]:
    """Texts' ids and log-probabilities, which show any bit that differs."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.num_cached_tokens) for o in outputs]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(tiny_config(dtype="bfloat16")) as opened:
        yield opened


@pytest.mark.parametrize("levels", [(1,), (2,), (1, 2), (2, 1), (1, 1)], ids=str)
def test_answers_are_those_from_before(llm: LLM, levels: tuple[int, ...]) -> None:
    before = answers(llm)
    assert answers(llm) != before, "the second time, a prefix is cached"
    for level in levels:
        llm.sleep(level)
    assert llm.is_sleeping
    assert engine_of(llm).sleep_level == max(levels)
    llm.wake_up()
    assert not llm.is_sleeping
    assert answers(llm) == before
    engine_of(llm).scheduler.check_integrity()


def test_awake_there_is_nothing_to_wake(llm: LLM) -> None:
    before = answers(llm)
    runner = engine_of(llm).runner
    pools = runner.kv_caches
    llm.wake_up()
    assert runner.kv_caches is pools
    assert not llm.is_sleeping
    assert [a[:2] for a in answers(llm)] == [b[:2] for b in before]


def test_requests_are_refused_meanwhile(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(EngineSleepingError, match="/wake_up"):
        answers(llm)
    assert llm.kv_stats().num_used_blocks == 0
    llm.wake_up()
    answers(llm)


def test_it_does_not_fall_asleep_over_requests(llm: LLM) -> None:
    long = SamplingParams(max_tokens=None, ignore_eos=True, n=3)
    caller = threading.Thread(
        target=lambda: llm.generate([[1, 2]], long, use_tqdm=False), daemon=True
    )
    caller.start()
    wait_until(lambda: engine_of(llm).has_unfinished())
    with pytest.raises(SleepError, match=r"^3 requests running or waiting"):
        llm.sleep()
    assert not llm.is_sleeping
    caller.join()
    llm.sleep()


@pytest.mark.parametrize("level", [0, 3, -1])
def test_other_levels(llm: LLM, level: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"level must be 1 or 2, not {level}"):
        llm.sleep(level)
    assert not llm.is_sleeping


def test_closing_asleep() -> None:
    llm = LLM(tiny_config())
    llm.sleep()
    llm.close()
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(EngineClosedError):
            call()


def test_profiles_start_and_stop_asleep(llm: LLM) -> None:
    llm.start_profile()
    answers(llm)
    llm.sleep()
    llm.wake_up()
    answers(llm)
    llm.sleep()
    assert llm.stop_profile().num_steps > 20
    llm.wake_up()
    llm.start_profile()
    answers(llm)
    assert llm.stop_profile().num_steps > 10


# What can go wrong


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LLAMA, tmp_path / "model"))


def test_a_checkpoint_that_is_gone(checkpoint: Path, tmp_path: Path) -> None:
    """It stays asleep, and wakes once the files are back."""
    with LLM(tiny_config(model=str(checkpoint))) as llm:
        before = answers(llm)
        llm.sleep(2)
        checkpoint.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"sleeps on: .*no such file"):
            llm.wake_up()
        assert llm.is_sleeping
        (tmp_path / "elsewhere").rename(checkpoint)
        llm.wake_up()
        assert answers(llm) == before


def test_a_checkpoint_that_is_another_one(checkpoint: Path) -> None:
    with LLM(tiny_config(model=str(checkpoint))) as llm:
        llm.sleep(2)
        config = json.loads((checkpoint / "config.json").read_text())
        config["rms_norm_eps"] = 0.1
        (checkpoint / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="configuration is not that of the start"):
            llm.wake_up()
        assert llm.is_sleeping


def test_no_memory_to_wake_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)
    backend = engine_of(llm).runner.backend
    new_kv_cache = backend.new_kv_cache
    allocated: list[Any] = []

    def fail_at_the_second(*args: Any) -> Any:
        if allocated:
            raise MemoryError("planted")
        allocated.append(new_kv_cache(*args))
        return allocated[0]

    llm.sleep()
    monkeypatch.setattr(backend, "new_kv_cache", fail_at_the_second)
    with pytest.raises(BackendError, match="sleeps on: planted"):
        llm.wake_up()
    assert llm.is_sleeping
    assert not engine_of(llm).runner.kv_caches
    monkeypatch.undo()
    llm.wake_up()
    assert answers(llm) == before


def test_weights_that_cannot_be_read_again(llm: LLM) -> None:
    before = answers(llm)
    engine_of(llm).runner._reload_weights = None
    with pytest.raises(SleepError, match="cannot read them again"):
        llm.sleep(2)
    assert [a[:2] for a in answers(llm)] == [b[:2] for b in before]


# Memory


LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
WEIGHTS_MB = 32000 * 512 * 4 / 1e6
POOL_MB = 2 * 2 * 700 * 16 * 512 * 4 / 1e6


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_the_system_gets_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool at level 1, weights too at level 2; both come back. Numbers are this process's own."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    flags = {"load_format": "dummy", "num_gpu_blocks_override": 700, "dtype": "float32"}
    monkeypatch.setattr(loading, "warm_up", lambda runner: None)
    with LLM(tiny_config(model=str(tmp_path), **flags)) as llm:
        runner = engine_of(llm).runner
        for cache in runner.kv_caches:  # its memory is taken when it is first written
            cache.keys[...] = 1
            cache.values[...] = 1
        del cache
        gc.collect()
        awake = resident_mb()
        llm.sleep(1)
        level_1 = resident_mb()
        llm.sleep(2)
        level_2 = resident_mb()
        llm.wake_up()
        woken = resident_mb()
    assert awake - level_1 > 0.9 * POOL_MB
    assert level_1 - level_2 > 0.9 * WEIGHTS_MB
    assert woken - level_2 > 0.9 * WEIGHTS_MB
