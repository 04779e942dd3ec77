"""Times of whole decode steps with random weights, beside the least time that reading takes."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu.matmul import random_linear
from bench.gpu.recorder import Recorder, Results
from bench.gpu.sizes import Sizes
from bench.gpu.target import Target, fill
from bench.gpu.timing import copy_bandwidth, time_replays
from bench.roofline import Gpu, Model, Step, parts_of, step_seconds
from rawpaged.engine.input_batch import make_decode_batch
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.gpu.backend import CudaBackend
from rawpaged.models.config import ModelConfig, RopeConfig
from rawpaged.models.weights import LlamaLayer, LlamaWeights
from rawpaged.request import Request
from rawpaged.sampling_params import SamplingParams
from rawpaged.scheduler.output import ScheduledRequest, SchedulerOutput

_BLOCK_SIZE = 16
_STEPS = 30


def time_steps(target: Target, recorder: Recorder, sizes: Sizes) -> None:
    """Each batch once as a graph on the device's clock, and as the engine calls it."""
    _, bandwidth = copy_bandwidth(target, sizes.copy_bytes, sizes.seconds)
    recorder.peaks["copy_gb_per_s"] = bandwidth / 1e9
    backend = CudaBackend(target.device, dtype="bfloat16")
    runners: list[ModelRunner] = []
    recorder.check("step/load", {}, lambda: runners.append(_runner(target, backend, sizes)))
    for runner in runners:
        for batch in sizes.step_batches:
            step = Step(batch, 1, sizes.step_context)
            parameters = {"batch": batch, "context": step.context, "dtype": "bfloat16"}
            run = partial(_measure, target, runner, sizes, step, bandwidth)
            recorder.measure(f"step/{step.name}", parameters, run)
        recorder.measure("step/sleep and wake", {"level": 1}, partial(_sleep, target, runner))
        runner.close()


def model_config(model: Model, max_model_len: int) -> ModelConfig:
    """A Llama of this shape."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=max_model_len,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=500000.0),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def floor_seconds(target: Target, model: Model, step: Step, bytes_per_s: float) -> float:
    """The kernels of bench/roofline.py at the measured bandwidth, arithmetic for nothing."""
    device = target.device
    gpu = Gpu(
        "",
        bytes_per_s,
        math.inf,
        math.inf,
        device.compute_capability,
        device.num_multiprocessors,
    )
    kernels, _, _ = step_seconds(parts_of(model, step, gpu), gpu)
    return kernels


def _runner(target: Target, backend: CudaBackend, sizes: Sizes) -> ModelRunner:
    most = max(sizes.step_batches)
    max_model_len = sizes.step_context + 2 * _BLOCK_SIZE
    runner = ModelRunner(
        model_config(sizes.model, max_model_len),
        _weights(target, backend, sizes.model),
        backend,
        num_blocks=most * -(-sizes.step_context // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_num_batched_tokens=most,
        max_num_seqs=most,
        max_model_len=max_model_len,
    )
    values = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    for cache in runner.kv_caches:
        for pool in (cache.keys, cache.values):
            fill(target, pool, values.astype(ml_dtypes.bfloat16))
    return runner


def _weights(target: Target, backend: CudaBackend, model: Model) -> LlamaWeights:
    """Made on the device: drawing eight billion numbers on the CPU takes minutes."""

    def norm() -> Any:
        return backend.upload(np.ones(model.hidden_size, np.float32))

    def layer() -> LlamaLayer:
        shapes = model.linears
        return LlamaLayer(
            input_layernorm=norm(),
            qkv_proj=random_linear(target, *shapes["qkv"]),
            q_norm=None,
            k_norm=None,
            o_proj=random_linear(target, *shapes["o"]),
            post_attention_layernorm=norm(),
            gate_up_proj=random_linear(target, *shapes["gate_up, silu"]),
            down_proj=random_linear(target, *shapes["down"]),
        )

    table = (model.vocab_size, model.hidden_size)
    return LlamaWeights(
        random_linear(target, *table),
        tuple(layer() for _ in range(model.num_layers)),
        norm(),
        random_linear(target, *table),
    )


def _measure(
    target: Target, runner: ModelRunner, sizes: Sizes, step: Step, bandwidth: float
) -> Results:
    output, requests = _decode_batch(sizes.model, step)
    replay = _captured(runner, output, step)
    replay()
    target.device.synchronize()
    count = 1 if target.is_simulated else _STEPS
    timing = time_replays(target.seconds, replay, sizes.seconds, 1, fewest=count)
    whole = _execute_seconds(runner, output, requests, count)
    floor = floor_seconds(target, sizes.model, step, bandwidth)
    return {
        "graph_ms": 1e3 * timing.median,
        "execute_ms": 1e3 * whole,
        "tokens_per_s": step.batch / whole,
        "floor_ms": None if target.is_simulated else 1e3 * floor,
        "graph_over_floor": None if target.is_simulated else timing.median / floor,
        "execute_over_floor": None if target.is_simulated else whole / floor,
    }


def _sleep(target: Target, runner: ModelRunner) -> Results:
    """Weights to host memory and back, and what that frees; the graphs are captured again."""
    weight_bytes = runner.model.weights.nbytes
    target.device.synchronize()
    free_awake, _ = runner.backend.memory_info()
    started = time.perf_counter()
    runner.sleep(1)
    asleep = time.perf_counter()
    free_asleep, _ = runner.backend.memory_info()
    runner.wake_up()
    target.device.synchronize()
    awake = time.perf_counter()
    return {
        "weight_bytes": weight_bytes,
        "freed_bytes": free_asleep - free_awake,
        "sleep_s": asleep - started,
        "wake_up_s": awake - asleep,
        "sleep_gb_per_s": weight_bytes / (asleep - started) / 1e9,
        "wake_up_gb_per_s": weight_bytes / (awake - asleep) / 1e9,
    }


def _decode_batch(model: Model, step: Step) -> tuple[SchedulerOutput, dict[str, Request]]:
    """Requests whose last token is at the end of the context, in blocks of their own."""
    width = -(-step.context // _BLOCK_SIZE)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    scheduled, requests = [], {}
    for i in range(step.batch):
        token_ids = [(7 * i + j) % model.vocab_size for j in range(step.context)]
        requests[str(i)] = Request(str(i), token_ids, params, max_tokens=1)
        scheduled.append(
            ScheduledRequest(
                str(i),
                (token_ids[-1],),
                start=step.context - 1,
                block_table=tuple(range(i * width, (i + 1) * width)),
                samples=True,
            )
        )
    return SchedulerOutput(tuple(scheduled), ()), requests


def _captured(runner: ModelRunner, output: SchedulerOutput, step: Step) -> Any:
    """The step's launches as a graph of its own, without sampling."""
    config, backend = runner.config, runner.backend
    plans = backend.static_plans(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        max_model_len=config.max_position_embeddings,
    )
    assert plans is not None
    plan = plans(step.batch)
    batch = make_decode_batch(output, _BLOCK_SIZE)
    assert batch is not None
    assert plan.fill(batch), "attention takes several rounds"

    def launches() -> None:
        runner.model.forward(plan.plan, runner.kv_caches)
        runner.model.compute_logits(plan.plan.logits_rows)

    launches()
    replay = backend.capture(launches)

    def replay_and_keep() -> None:
        # The graph reads the plan's arrays, which go with the plan.
        assert plan.plan.num_tokens == step.batch
        replay()

    return replay_and_keep


def _execute_seconds(
    runner: ModelRunner, output: SchedulerOutput, requests: dict[str, Request], count: int
) -> float:
    """Median of whole calls, from the scheduler's output to sampled ids on the host."""
    runner.execute(output, requests)
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        runner.execute(output, requests)
        durations.append(time.perf_counter() - started)
    return float(np.median(durations))
