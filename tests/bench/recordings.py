"""Recordings of tiny engines, where their calls are made, and what these calls give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from bench.recorded_call import CallView
from bench.replay_operands import Operands
from bench.replay_places import CpuPlace, Place
from bench.rows import Origin
from rawpaged.backend import Backend, KVCache, TokenLogprobRows
from rawpaged.cpu.kv_cache import by_slot
from rawpaged.engine.op_recorder import RECORDED_OPS, OpRecorder
from rawpaged.engine.op_recording import Recording, read_recording
from rawpaged.engine.profiling import ProfileOptions, Profiler
from tests.engine.helpers import request, tiny_engine

ORIGIN = Origin("command", commit="", machine={})


def record_engine(engine: Any, path: Path) -> Recording:
    """A prompt in two chunks beside another, then decode steps with penalties and logprobs."""
    profiler = Profiler(engine)
    profiler.start(ProfileOptions(record_path=path))
    engine.add_request(request("a", range(3, 45), max_tokens=3, frequency_penalty=0.5))
    engine.add_request(request("b", [5, 6, 7], max_tokens=4, temperature=0.7, logprobs=2))
    while engine.has_unfinished():
        with profiler.step():
            engine.step()
    profiler.stop()
    return read_recording(path)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of a model that normalises heads in place."""
    return record_cpu("qwen3", tmp_path_factory.mktemp("replay") / "ops.json")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of one whose kernels other tests compile too."""
    return record_cpu("llama", tmp_path_factory.mktemp("replay") / "ops.json")


def record_cpu(model: str, path: Path) -> Recording:
    """A CPU engine's steps, with a copy within the pool and one to the host besides."""
    engine = tiny_engine(model, max_num_batched_tokens=32)
    recorded = record_engine(engine, path)
    backend, pools = engine.runner.backend, engine.runner.kv_caches
    recorder = OpRecorder(backend, lambda: pools)
    cache = pools[0].keys.shape  # of float32
    host = [backend.new_host_kv_cache(4, cache[1], cache[2], cache[3]) for _ in pools]
    pairs = np.array([[0, 3], [2, 1]], np.int64)
    recorder.ops().copy_blocks(pools, pools, pairs)
    recorder.ops().copy_blocks(host, pools, pairs)
    copies = recorder.recording().calls
    engine.close()
    assert {call.op for call in (*recorded.calls, *copies)} == set(RECORDED_OPS)
    return msgspec.structs.replace(recorded, calls=(*recorded.calls, *copies))


@pytest.fixture
def place() -> Iterator[Place]:
    opened = CpuPlace(dtype="float32", threads=1, measures=False)
    yield opened
    opened.close()


def views(recording: Recording, backend: Backend) -> list[CallView]:
    return [CallView(recording, call, backend) for call in recording.calls]


def outputs(view: CallView, seed: int) -> dict[str, npt.NDArray[np.float64]]:
    """All floats that a call of an op may have written, and what it gave back."""
    operands = Operands(view, seed)
    made = {**operands.shared(), **operands.stored(0)}
    given = getattr(view.backend, view.call.op)(**made)
    found: dict[str, Any] = {
        name: view.backend.download(value)
        for name, value in made.items()
        if hasattr(value, "strides") and not isinstance(value, np.generic)
    }
    for name, value in made.items():
        if isinstance(value, KVCache) and value.key_scale is None:
            found[name] = written(view, value)
    if isinstance(given, TokenLogprobRows):
        found |= {field: getattr(given, field) for field in ("chosen", "top_logprobs", "ranks")}
    elif given is not None:
        found["result"] = given
    return {name: np.asarray(value).astype(np.float64) for name, value in found.items()}


def written(view: CallView, cache: KVCache) -> npt.NDArray[np.float64]:
    """Keys and values of all slots [2, slots, heads, head_dim], as any backend has them."""
    if view.backend.name == "cpu":
        keys, values = by_slot(cache, len(cache.keys))
    else:
        pools = (view.backend.download(pool).swapaxes(1, 2) for pool in (cache.keys, cache.values))
        keys, values = (pool.reshape(-1, *pool.shape[2:]) for pool in pools)
    if keys.dtype == np.uint16:
        keys, values = ((x.astype(np.uint32) << 16).view(np.float32) for x in (keys, values))
    return np.stack([keys, values[..., : keys.shape[-1]]]).astype(np.float64)
