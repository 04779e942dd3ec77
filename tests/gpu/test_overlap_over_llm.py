"""Whole requests over steps that overlap: text, stop strings, choices among samples, profiles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine import loading
from rawpaged.gpu.backend import CudaBackend
from tests.hostsim.cupy_stand_in import CupyStandIn, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader
from tests.tiny import LLAMA, engine_of, write_tokenizer

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

PROMPTS = [[5, 6, 7, 8], [100, 50, 25], [9] * 20, [3, 4]]


class UnprofiledDevice(SimulatedCudaDevice):
    """A late device without a profiler of its own."""

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        pass


@pytest.fixture
def late_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines for a GPU get one that does nothing before somebody waits for it."""

    def open_backend(*_: Any, dtype: str, **__: Any) -> CudaBackend:
        return CudaBackend(UnprofiledDevice(CupyStandIn(HostLoader("plain"))), dtype=dtype)

    monkeypatch.setattr(loading, "open_backend", open_backend)


def open_llm(directory: Path, **flags: Any) -> LLM:
    return LLM(
        LLAMA,
        tokenizer=str(write_tokenizer(directory)),
        device="cuda",
        dtype="bfloat16",
        batch_invariant=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=12,
        **flags,
    )


def params(stop: str | None) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
    return [
        SamplingParams(**common, seed=1, stop=stop, logprobs=1),
        SamplingParams(**common, seed=2, stop=stop, n=1, best_of=3),
        SamplingParams(**common, seed=3, n=2, prompt_logprobs=1),
        SamplingParams(**common, seed=4, min_tokens=3, frequency_penalty=0.5),
    ]


def answers(llm: LLM, stop: str | None) -> list[Any]:
    outputs = llm.generate(PROMPTS, params(stop), use_tqdm=False)
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


@pytest.mark.usefixtures("late_backend")
def test_answers_are_those_of_steps_one_after_another(tmp_path: Path) -> None:
    with open_llm(tmp_path, async_scheduling=False) as llm:
        assert not engine_of(llm).runner.runs_ahead
        text = answers(llm, None)[0][0][0].text
        stop = text[2:4]
        expected = answers(llm, stop)
        assert expected[0][0][0].stop_reason == stop
    with open_llm(tmp_path) as llm:
        assert engine_of(llm).runner.runs_ahead, "the default on a GPU"
        assert answers(llm, stop) == expected
        assert engine_of(llm).scheduler.num_used_blocks == 0


@pytest.mark.usefixtures("late_backend")
def test_a_profile_shows_rounds(tmp_path: Path) -> None:
    """Each launches a step and ends another, but for the first and the last."""
    with open_llm(tmp_path) as llm:
        llm.start_profile()
        llm.generate([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        profile = llm.stop_profile()
    phases = Counter(each.name for each in profile.ranges if each.kind == "phase")
    steps = [each for each in profile.ranges if each.kind == "step"]
    assert profile.num_steps == len(steps) == 7
    assert phases["wait"] == phases["update"] == phases["sample"] == 6
    assert phases["schedule"] == phases["detokenise"] == 7
    assert phases["forward"] + phases["graph"] == 6
    named = [each.name.split(" ", 1)[1:] for each in steps]
    assert named == [["prefill=1x3 decode=0"], *[["prefill=0 decode=1"]] * 5, []]
    ops = Counter(each.name.split()[0] for each in profile.ranges if each.kind == "op")
    assert ops["sample"] == 6
