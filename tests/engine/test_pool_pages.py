"""The engine tells whoever takes the pool's pages ahead how far its blocks are used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.backend import KVCache
from rawpaged.cpu.backend import CpuBackend
from tests.tiny import engine_of, tiny_config


class Recorder:
    """A PagesAhead that keeps what it hears."""

    def __init__(self) -> None:
        self.num_reached: list[int] = []
        self.is_step = self.is_closed = False

    def begin_step(self, num_reached_blocks: int) -> None:
        assert not self.is_step
        assert not self.is_closed
        self.is_step = True
        self.num_reached.append(num_reached_blocks)

    def end_step(self) -> None:
        assert self.is_step
        self.is_step = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """One for each pool that is made."""
    made: list[Recorder] = []

    def pages_ahead(backend: CpuBackend, caches: Sequence[KVCache]) -> Recorder:
        assert len(caches) > 0
        made.append(Recorder())
        return made[-1]

    monkeypatch.setattr(CpuBackend, "pages_ahead", pages_ahead)
    return made


def test_every_step_tells_how_far_blocks_are_used(recorders: list[Recorder]) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    with LLM(tiny_config(enable_prefix_caching=False)) as llm:
        (recorder,) = recorders
        recorder.num_reached.clear()
        block_size = engine_of(llm).runner.block_size
        llm.generate([list(range(3, 3 + block_size))], params, use_tqdm=False)
        # A block for the prompt, one for what is generated, and another from token 17 on.
        assert recorder.num_reached == [1] + [2] * block_size + [3] * (19 - block_size)
        recorder.num_reached.clear()
        llm.generate([[3, 4]], params, use_tqdm=False)
        assert set(recorder.num_reached) == {3}
        assert not recorder.is_step
    assert recorder.is_closed


def test_a_sleeping_engine_takes_no_pages(recorders: list[Recorder]) -> None:
    with LLM(tiny_config()) as llm:
        llm.sleep(1)
        assert [each.is_closed for each in recorders] == [True]
        llm.wake_up()
        assert [each.is_closed for each in recorders] == [True, False]
    assert all(each.is_closed for each in recorders)
