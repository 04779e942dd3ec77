"""The engine on a device: transformers' tokens, and graphs that give the bits of eager steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from bench.gpu.recorder import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target
from rawpaged.backend import KVCache
from rawpaged.config import SchedulerConfig
from rawpaged.engine.engine import Engine
from rawpaged.gpu.backend import CudaBackend
from rawpaged.gpu.device import numpy_dtype
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import load_weights
from tests.engine.helpers import LLAMA_FAMILY, TINY, RecordingRunner, golden, request, run

_TOLERANCE = {"float16": 8e-3, "bfloat16": 8e-2}
"""Of logits, whose standard deviation is 0.6 to 1; as in tests/gpu/test_engine.py."""
_MAX_MODEL_LEN = 160
_NUM_BLOCKS = 40
_MOST_TOKENS = 40


def check_engine(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Tiny checkpoints of every model there is; simulated only the first of them."""
    names = LLAMA_FAMILY if sizes.checks_all else LLAMA_FAMILY[:1]
    most = _MOST_TOKENS if sizes.checks_all else 4
    for name in names:
        check = partial(_greedy_ids, target, name, most)
        recorder.check("engine/greedy ids", {"model": name, "dtype": "float16"}, check)
    for dtype in _TOLERANCE if sizes.checks_all else ("bfloat16",):
        check = partial(_prompt_in_chunks, target, dtype)
        recorder.check("engine/prompt in chunks", {"dtype": dtype}, check)
    check = partial(_graphs_equal_eager, target)
    recorder.check("engine/graphs equal eager steps", {"dtype": "bfloat16"}, check)
    check = partial(_overlapping_equal_others, target)
    recorder.check("engine/overlapping steps equal others", {"dtype": "bfloat16"}, check)
    check = partial(_sleep_and_wake, target)
    recorder.check("engine/sleep and wake", {"level": 1, "dtype": "bfloat16"}, check)


class _Runner(RecordingRunner):
    """Poisons blocks on the device."""

    def poison(self, caches: Sequence[KVCache], block_ids: Sequence[int]) -> None:
        assert isinstance(self.backend, CudaBackend)
        device = self.backend.device
        for cache in caches:
            nan = np.full(cache.keys.shape[1:], np.nan, numpy_dtype(self.backend.dtype))
            for pool in (cache.keys, cache.values):
                for block_id in block_ids:
                    device.write(pool[block_id], nan)
        device.synchronize()


def _engine(
    target: Target,
    name: str,
    dtype: str,
    *,
    enforce_eager: bool,
    budget: int = 64,
    async_scheduling: bool = False,
) -> tuple[Engine, _Runner]:
    checkpoint = open_checkpoint(str(TINY / name), progress=False)
    backend = CudaBackend(target.device, dtype=dtype)
    runner = _Runner(
        checkpoint.model_config,
        load_weights(checkpoint, backend, progress=False),
        backend,
        num_blocks=_NUM_BLOCKS,
        block_size=16,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=_MAX_MODEL_LEN,
        enforce_eager=enforce_eager,
        async_scheduling=async_scheduling,
    )
    config = SchedulerConfig(
        num_blocks=_NUM_BLOCKS,
        block_size=16,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
    )
    return Engine(config, runner), runner


def _greedy_ids(target: Target, name: str, most: int) -> None:
    """Up to the first step at which the best two lie nearer than half precision tells apart."""
    expected = golden(name)
    near = np.flatnonzero(expected["greedy_margin"] < _TOLERANCE["float16"])
    count = min(int(near[0]) if len(near) else most, most)
    engine, _ = _engine(target, name, "float16", enforce_eager=False)
    prompt = expected["input_ids"][: int(expected["greedy_prompt_len"])].tolist()
    tokens = run(engine, [request("a", prompt, max_tokens=count)])["a"]
    engine.close()
    assert tokens == expected["greedy_ids"][:count].tolist(), f"{tokens=}"


def _prompt_in_chunks(target: Target, dtype: str) -> None:
    expected = golden("llama")
    engine, runner = _engine(target, "llama", dtype, enforce_eager=True, budget=33)
    run(engine, [request("a", expected["input_ids"].tolist(), max_tokens=1)])
    logits = np.frombuffer(runner.logits["a"][0], np.float32)
    engine.close()
    error = abs(logits - expected["logits"][-1]).max()
    assert error < _TOLERANCE[dtype], f"{error=}"


def _graphs_equal_eager(target: Target) -> None:
    prompts = [[(7 * i + j) % 320 for j in range(length)] for i, length in enumerate((3, 20, 40))]
    logits = []
    for enforce_eager in (True, False):
        engine, runner = _engine(target, "llama", "bfloat16", enforce_eager=enforce_eager)
        run(engine, [request(str(i), p, max_tokens=3 + i) for i, p in enumerate(prompts)])
        logits.append(dict(runner.logits))
        engine.close()
    assert logits[0] == logits[1], "bits of logits differ"


def _overlapping_equal_others(target: Target) -> None:
    """Ids that stay on the device, and results that come through pinned memory."""
    prompts = [[(7 * i + j) % 320 for j in range(length)] for i, length in enumerate((3, 20, 40))]
    found = []
    for async_scheduling in (True, False):
        engine, runner = _engine(
            target, "llama", "bfloat16", enforce_eager=False, async_scheduling=async_scheduling
        )
        requests = [request(str(i), p, max_tokens=4 + i) for i, p in enumerate(prompts)]
        tokens = run(engine, requests)
        found.append((tokens, runner.recorded()))
        engine.close()
    assert found[0] == found[1], "tokens or bits of logits differ"


def _sleep_and_wake(target: Target) -> None:
    """Weights that come back from host memory give the bits that they gave before."""
    engine, runner = _engine(target, "llama", "bfloat16", enforce_eager=False)
    prompt = [(7 * j) % 320 for j in range(20)]
    run(engine, [request("before", prompt, max_tokens=3)])
    engine.sleep(1)
    engine.wake_up()
    runner.poison(runner.kv_caches, range(_NUM_BLOCKS))
    run(engine, [request("after", prompt, max_tokens=3)])
    logits = dict(runner.logits)
    engine.close()
    assert logits["before"] == logits["after"], "bits of logits differ"
