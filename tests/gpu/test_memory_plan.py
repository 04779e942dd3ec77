"""A pool that gets what the largest steps leave, over a device that has only so much memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.engine import loading
from rawpaged.errors import BackendError, ConfigError
from rawpaged.gpu.backend import CudaBackend
from tests.conftest import TINY
from tests.hostsim.cupy_stand_in import CupyStandIn, Memory, SimulatedCudaDevice
from tests.hostsim.loader import HostLoader
from tests.tiny import engine_of

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

FLAGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "max_model_len": 256,
}
MODEL = str(TINY / "llama_tied_hd32")
PARAMS = SamplingParams(
    max_tokens=3, ignore_eos=True, logprobs=20, frequency_penalty=0.5, prompt_logprobs=3
)


@pytest.fixture
def open_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens an LLM on a device of that many bytes, others having taken some."""
    opened: list[LLM] = []

    def open_llm(total_bytes: int, others: int = 0, **flags: Any) -> tuple[LLM, Memory]:
        device = SimulatedCudaDevice(CupyStandIn(HostLoader("plain"), total_bytes=total_bytes))
        memory = device.stand_in.memory[0]
        memory.used = others
        memories.append(memory)
        monkeypatch.setattr(
            loading, "open_backend", lambda *_, dtype, **__: CudaBackend(device, dtype=dtype)
        )
        opened.append(LLM(MODEL, **{**FLAGS, **flags}))
        return opened[-1], memory

    memories: list[Memory] = []
    yield open_llm
    for llm in opened:
        llm.close()
    for memory in memories:
        assert memory.used in (0, OTHERS)
        assert memory.cached == memory.pinned == 0


OTHERS = 3_000_000
ROUNDING = 4096
"""Sizes of arrays are rounded up to 512 bytes."""


def test_the_pool_gets_what_the_largest_steps_leave(open_with: Any) -> None:
    """Steps that follow need no more, and no block more would fit."""
    total, share = 6_200_000, 0.9
    llm, memory = open_with(total, OTHERS, gpu_memory_utilization=share)
    plan = llm.memory_plan
    bytes_per_block = plan.bytes_per_token * plan.block_size
    assert plan.weights_bytes == engine_of(llm).runner.model.weights.nbytes
    assert 16 < plan.num_blocks < 64, "neither the least nor all that would be of use"
    # The workspace of split products is there before the weights.
    backend: Any = engine_of(llm).runner.backend
    before = OTHERS + backend._linear._workspace.nbytes
    assert 0 <= share * total - before - plan.total_bytes < bytes_per_block
    # The largest prefill, then decode steps of all that may run.
    prompts = [[(7 * i + j) % 300 for j in range(39)] for i in range(4)]
    llm.generate(prompts, PARAMS, use_tqdm=False)
    assert memory.used + memory.cached <= share * total + ROUNDING


def test_a_given_size_is_not_measured(open_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "run_largest_steps", lambda *_, **__: pytest.fail("it is run"))
    for flags in ({"num_gpu_blocks_override": 20}, {"kv_cache_memory_bytes": 300_000}):
        llm, _ = open_with(60_000_000, **flags)
        assert llm.memory_plan.kv_bytes <= 300_000


def test_no_block_beside_the_largest_step(open_with: Any) -> None:
    """The estimate has let it pass, the dry run does not."""
    with pytest.raises(BackendError, match=r"no KV block fits.*gpu_memory_utilization=0\.5 of"):
        open_with(10_100_000, OTHERS, gpu_memory_utilization=0.5)


def test_a_step_that_does_not_fit(open_with: Any) -> None:
    with pytest.raises(BackendError, match=r"out of memory while starting: Out of memory alloc"):
        open_with(4_700_000, OTHERS, gpu_memory_utilization=1.0)


def test_a_request_that_the_measured_pool_does_not_hold(open_with: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=256 does not fit the KV pool of"):
        open_with(5_750_000, OTHERS)
