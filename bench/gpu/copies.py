"""Times of copies: within the device, to and from the host, and of KV blocks between pools."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.attention_cases import BLOCK_SIZE
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target
from bench.gpu.timing import Work, copy_bandwidth, summarize, time_device, time_queued
from rawpaged.gpu.backend import CudaBackend

_ROUNDS = 3


def time_copies(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """The measured copy bandwidth, which later rows are held against, at a few sizes."""
    for shift in (6, 3, 0):
        num_bytes = sizes.copy_bytes >> shift
        run = partial(_copy, target, num_bytes, sizes.seconds)
        recorder.measure("copy", {"bytes": num_bytes}, run)


def time_host_copies(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Over the bus: between pinned memory and the device, and as weights and results go.

    `upload` takes memory of the system's through two pinned buffers; `download` gives such memory.
    """
    num_bytes = sizes.copy_bytes >> 2
    on_device = target.device.empty((num_bytes,), "uint8")
    pinned = target.device.pinned((num_bytes,), "uint8")
    for name, to, source in (("to device", on_device, pinned), ("from device", pinned, on_device)):
        run = partial(_pinned, target, to, source, sizes.seconds)
        recorder.measure(f"pinned {name}", {"bytes": num_bytes}, run)
    host = np.ones(num_bytes, np.uint8)
    for name, call in (
        ("upload", lambda: target.device.upload(host)),
        ("download", lambda: target.device.download(on_device)),
    ):
        run = partial(_by_the_clock, target, call, num_bytes)
        recorder.measure(name, {"bytes": num_bytes}, run)
    floats = np.ones(num_bytes // 4, np.float32)
    run = partial(
        _by_the_clock, target, lambda: target.device.upload(floats, "bfloat16"), num_bytes
    )
    recorder.measure("upload as bfloat16", {"bytes": num_bytes}, run)


def time_block_copies(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Scattered blocks of all layers, within the pool and to and from one in pinned memory."""
    model = sizes.model
    backend = CudaBackend(target.device, dtype="bfloat16")
    shape = (model.num_kv_heads, model.head_dim, BLOCK_SIZE)
    most = max(sizes.block_copies)
    device = [backend.new_kv_cache(2 * most, *shape) for _ in range(model.num_layers)]
    host = [backend.new_host_kv_cache(most, *shape) for _ in range(model.num_layers)]
    block_bytes = model.num_layers * backend.kv_bytes_per_block(*shape)
    for count in sizes.block_copies:
        ids = np.random.default_rng(0).permutation(2 * most).astype(np.int64)
        inner, outer = ids[:count], np.arange(count, dtype=np.int64)
        for name, targets, sources, pairs in (
            ("within the pool", device, device, (inner, ids[most : most + count])),
            ("to the host", host, device, (inner, outer)),
            ("from the host", device, host, (outer, inner)),
        ):
            run = partial(
                _blocks,
                target,
                partial(backend.copy_blocks, targets, sources, np.stack(pairs, axis=1)),
                2 * count * block_bytes,
                sizes.seconds,
            )
            parameters = {"blocks": count, "layers": model.num_layers, "block_bytes": block_bytes}
            recorder.measure(f"copy_blocks/{name}", parameters, run)
    backend.close()


def _copy(target: Target, num_bytes: int, seconds: float) -> Results:
    timing, _ = copy_bandwidth(target, num_bytes, seconds)
    return summarize(timing, Work(2 * num_bytes))


def _pinned(target: Target, to: Any, source: Any, seconds: float) -> Results:
    timing = time_device(target, [lambda: target.copy(to, source)], seconds)
    return summarize(timing, Work(to.nbytes))


def _blocks(target: Target, call: Callable[[], object], num_bytes: int, seconds: float) -> Results:
    """With the upload of the pairs, and the launches of all layers out of Python."""
    return summarize(time_queued(target, [call], seconds), Work(num_bytes))


def _by_the_clock(target: Target, call: Callable[[], object], num_bytes: int) -> Results:
    """Of the host, until the device is done: the copy through pinned buffers is its work too."""
    call()
    durations = []
    for _ in range(_ROUNDS):
        target.device.synchronize()
        started = time.perf_counter()
        call()
        target.device.synchronize()
        durations.append(time.perf_counter() - started)
    best = min(durations)
    return {
        "calls": _ROUNDS,
        "us": 1e6 * best,
        "bytes": num_bytes,
        "gb_per_s": num_bytes / best / 1e9,
    }
