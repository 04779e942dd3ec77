"""Engines over tiny checkpoints, with small pools, for tests that look inside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rawpaged.backend import KVCache
from rawpaged.config import SchedulerConfig
from rawpaged.devices import open_backend
from rawpaged.engine.engine import Engine
from rawpaged.engine.launched_step import LaunchedStep
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.request import Request, RequestGroup
from rawpaged.sampling_params import SamplingParams
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import load_weights
from tests.ops.kv_elements import poison_for

TINY = Path(__file__).parent.parent / "golden" / "tiny"
LLAMA_FAMILY = (
    "llama",
    "llama_tied_hd32",
    "llama31_rope",
    "llama_yarn",
    "llama_mha_bias",
    "llama_mqa",
    "mistral_sw",
    "qwen2",
    "qwen3",
)


class RecordingRunner(ModelRunner):
    """Keeps the bytes of every row of logits that a token was sampled from, and poisons the pool.

    A block that a kernel reads where nothing was written turns logits into NaN, or, where a cache
    has none, into others.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: defaultdict[str, list[bytes]] = defaultdict(list)
        self._on_device: list[tuple[Sequence[Request], Any]] = []
        self.poison(self.kv_caches, range(self.num_blocks))
        self.poison(self.host_kv_caches, range(self.num_host_blocks))

    def poison(self, caches: Sequence[KVCache], block_ids: Sequence[int]) -> None:
        """Fill these blocks with NaN, or what shows like it."""

        def write() -> None:
            for cache in caches:
                for pool in (cache.keys, cache.values):
                    pool[list(block_ids)] = poison_for(pool)

        # A device that is late may have yet to read what these blocks held.
        in_order = getattr(getattr(self.backend, "device", None), "in_order", None)
        if in_order is None:
            write()
        else:
            in_order(write)

    def launch_sampling(self, step: LaunchedStep) -> None:
        if step.sampling_requests:
            self._keep(step)
        super().launch_sampling(step)

    def _keep(self, step: LaunchedStep) -> None:
        """Keep the step's logits; on the device if nobody waits for it."""
        if not self.runs_ahead:
            self._note(step.sampling_requests, self.backend.download(step.logits))
            return
        num_rows = len(step.sampling_requests)
        copy = self.backend.empty(step.logits.shape, "float32")
        rows = self.backend.upload(np.arange(num_rows, dtype=np.int32))
        self.backend.gather_rows(copy, step.logits, rows)
        self._on_device.append((step.sampling_requests, copy))

    def _note(self, requests: Sequence[Request], logits: npt.NDArray[Any]) -> None:
        for request, row in zip(requests, logits, strict=True):
            self.logits[request.request_id].append(row.tobytes())

    def recorded(self) -> dict[str, list[bytes]]:
        """Rows of logits by request id, in order of sampling."""
        for requests, copy in self._on_device:
            self._note(requests, self.backend.download(copy))
        self._on_device.clear()
        return dict(self.logits)


def tiny_engine(
    name: str = "llama",
    *,
    dtype: str = "float32",
    kv_cache_dtype: str | None = None,
    num_blocks: int = 64,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 160,
    num_threads: int = 1,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    keep_quantized: bool = False,
    runner_type: type[RecordingRunner] = RecordingRunner,
) -> Engine:
    """An engine over a golden checkpoint, its runner a RecordingRunner; swaps into host blocks.

    `name` may also be the absolute path of a file.
    """
    checkpoint = open_checkpoint(str(TINY / name), progress=False)
    backend = open_backend(
        "cpu", dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=num_threads
    )
    runner = runner_type(
        checkpoint.model_config,
        load_weights(checkpoint, backend, keep_quantized=keep_quantized, progress=False),
        backend,
        num_blocks=num_blocks,
        block_size=16,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_host_blocks=num_host_blocks,
    )
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        preemption_mode="swap" if num_host_blocks else "recompute",
    )
    return Engine(config, runner)


def recorded_logits(engine: Engine) -> dict[str, list[bytes]]:
    """Rows of logits by request id, in order of sampling."""
    assert isinstance(engine.runner, RecordingRunner)
    return engine.runner.recorded()


def request(
    request_id: str, prompt: Sequence[int], *, sample_index: int = 0, **params: Any
) -> Request:
    """A request that runs to max_tokens."""
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16, **params}
    sampling = SamplingParams(**given)
    assert sampling.max_tokens is not None
    return Request(
        request_id,
        prompt,
        sampling,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed or 0,
        sample_index=sample_index,
    )


def samples(name: str, n: int, prompt: Sequence[int], **params: Any) -> list[Request]:
    """Requests name.0, name.1, ... of one group."""
    seed = params.pop("seed", 0)
    requests = [
        request(f"{name}.{i}", prompt, sample_index=i, seed=seed + i, **params) for i in range(n)
    ]
    return RequestGroup(requests).requests[:]


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Output token ids by request id; blocks are checked after every step, and poisoned if free."""
    for group in dict.fromkeys(each.group for each in requests):
        engine.add_group(group)
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        engine.scheduler.check_integrity()
        poison_free_blocks(engine)
    assert engine.scheduler.num_used_blocks == 0
    assert engine.scheduler.swap_space.block_pool.num_used_blocks == 0
    return tokens


def poison_free_blocks(engine: Engine) -> None:
    """Fill blocks of both pools that hold nothing with NaN, so that whoever reads one shows it."""
    assert isinstance(engine.runner, RecordingRunner)
    scheduler, runner = engine.scheduler, engine.runner
    for pool, caches in (
        (scheduler.kv_cache_manager.block_pool, runner.kv_caches),
        (scheduler.swap_space.block_pool, runner.host_kv_caches),
    ):
        free = [
            block_id
            for block_id in range(pool.num_blocks)
            if pool.ref_count(block_id) == 0 and pool.block_hash(block_id) is None
        ]
        runner.poison(caches, free)


def golden(name: str) -> dict[str, npt.NDArray[Any]]:
    """expected.npz of a tiny checkpoint."""
    with np.load(TINY / name / "expected.npz") as arrays:
        return dict(arrays)
