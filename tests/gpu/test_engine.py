"""The engine on the CUDA backend, its kernels in the simulators, against transformers' numbers.

Graphs are recorded launches played again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.backend import KVScales
from rawpaged.config import SchedulerConfig
from rawpaged.engine.engine import Engine
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.device import Device
from rawpaged.request import Request, RequestGroup
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import load_weights
from tests.engine.helpers import (
    LLAMA_FAMILY,
    TINY,
    RecordingRunner,
    golden,
    recorded_logits,
    request,
    run,
    samples,
)
from tests.hostsim.cupy_stand_in import CupyStandIn, SimulatedCudaDevice
from tests.hostsim.device import HostDevice
from tests.hostsim.loader import HostLoader

pytestmark = [pytest.mark.gpusim, pytest.mark.usefixtures("cuda_wheels", "numba_cuda")]

TOLERANCE = {"float16": 8e-3, "bfloat16": 8e-2}
"""Of logits, whose standard deviation is 0.6 to 1."""

MAX_MODEL_LEN = 160


def gpu_engine(
    name: str,
    dtype: str,
    *,
    device: Device | None = None,
    kv_cache_dtype: str | None = None,
    kv_scales: Sequence[KVScales] | None = None,
    enforce_eager: bool = True,
    num_blocks: int = 40,
    budget: int = 64,
    batch_invariant: bool = False,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    async_scheduling: bool = False,
) -> Engine:
    """A tiny checkpoint's engine over simulated kernels."""
    checkpoint = open_checkpoint(str(TINY / name), progress=False)
    device = device or HostDevice(HostLoader(mode="plain"))
    backend = CudaBackend(device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    runner = RecordingRunner(
        checkpoint.model_config,
        load_weights(checkpoint, backend, progress=False),
        backend,
        num_blocks=num_blocks,
        block_size=16,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=MAX_MODEL_LEN,
        kv_scales=kv_scales,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        num_host_blocks=num_host_blocks,
        async_scheduling=async_scheduling,
    )
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=min(MAX_MODEL_LEN, 16 * num_blocks),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        preemption_mode="swap" if num_host_blocks else "recompute",
        batch_invariant=batch_invariant,
    )
    return Engine(config, runner)


def rows_of(engine: Engine, request_id: str) -> npt.NDArray[np.float32]:
    rows = recorded_logits(engine)[request_id]
    return np.stack([np.frombuffer(row, np.float32) for row in rows])


def greedy(engine: Engine, expected: dict[str, npt.NDArray[Any]], count: int) -> list[int]:
    prompt = expected["input_ids"][: int(expected["greedy_prompt_len"])].tolist()
    return run(engine, [request("a", prompt, max_tokens=count)])["a"]


@pytest.mark.parametrize("name", LLAMA_FAMILY)
def test_greedy_ids_equal_the_oracle(name: str) -> None:
    """Up to the first step at which the best two lie nearer than half precision tells apart."""
    expected = golden(name)
    near = np.flatnonzero(expected["greedy_margin"] < TOLERANCE["float16"])
    count = min(int(near[0]) if len(near) else 40, 12)
    assert count > 0
    engine = gpu_engine(name, "float16")
    assert greedy(engine, expected, count) == expected["greedy_ids"][:count].tolist()
    engine.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_a_prompt_in_chunks(dtype: str) -> None:
    expected = golden("llama")
    ids = expected["input_ids"].tolist()
    engine = gpu_engine("llama", dtype, budget=33)
    run(engine, [request("a", ids, max_tokens=1)])
    error = np.abs(rows_of(engine, "a")[0] - expected["logits"][-1]).max()
    assert error < TOLERANCE[dtype]
    engine.close()


def test_graphs_give_the_bits_of_eager_steps_in_any_batch() -> None:
    prompts = [[(7 * i + j) % 320 for j in range(length)] for i, length in enumerate((3, 20, 40))]
    logits = []
    for enforce_eager in (True, False):
        engine = gpu_engine("llama", "bfloat16", enforce_eager=enforce_eager)
        run(engine, [request(str(i), p, max_tokens=3 + i) for i, p in enumerate(prompts)])
        logits.append(recorded_logits(engine))
        engine.close()
    assert logits[0] == logits[1]


def test_a_small_pool_preempts_and_leaves_the_tokens_alone() -> None:
    prompts = [[(7 * i + j) % 320 for j in range(30)] for i in range(3)]
    tokens = []
    for num_blocks in (40, 6):
        engine = gpu_engine("llama", "float16", num_blocks=num_blocks)
        tokens.append(
            run(engine, [request(str(i), p, max_tokens=6) for i, p in enumerate(prompts)])
        )
        assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 6)
        engine.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_device_that_is_late_gives_the_same_bits(enforce_eager: bool) -> None:
    """Nothing is overwritten or freed that work in the stream's queue has yet to read."""
    prompts = [[(7 * i + j) % 320 for j in range(length)] for i, length in enumerate((3, 20))]
    late = SimulatedCudaDevice(CupyStandIn(HostLoader(mode="plain")))
    logits = []
    for device in (late, None):
        engine = gpu_engine("llama", "bfloat16", device=device, enforce_eager=enforce_eager)
        run(engine, [request(str(i), p, max_tokens=2 + i) for i, p in enumerate(prompts)])
        logits.append(recorded_logits(engine))
        engine.close()
    assert logits[0] == logits[1]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_samples_share_copy_and_swap(enforce_eager: bool) -> None:
    """Forks, copies on write, blocks to pinned memory and back: the bits of each sample alone."""

    def groups() -> list[list[Request]]:
        return [
            samples(str(i), n, [(7 * i + j) % 320 for j in range(length)], max_tokens=6,
                    temperature=1.0, seed=i)
            for i, (n, length) in enumerate(((1, 30), (3, 21), (2, 30)))
        ]  # fmt: skip

    flags: dict[str, Any] = {"enforce_eager": enforce_eager, "batch_invariant": True}
    alone = gpu_engine("llama", "bfloat16", **flags, enable_prefix_caching=False)
    for each in [each for group in groups() for each in group]:
        each.group = RequestGroup((each,))
        run(alone, [each])
    expected = recorded_logits(alone)
    alone.close()
    engine = gpu_engine("llama", "bfloat16", **flags, num_blocks=6, num_host_blocks=8)
    run(engine, [each for group in groups() for each in group])
    assert recorded_logits(engine) == expected
    stats = engine.scheduler.kv_stats()
    assert min(stats.num_forks, stats.num_block_copies, stats.num_swapped_in_blocks) > 0
    engine.close()
