"""From an EngineConfig to an engine that is ready: files, tokenizer, memory, weights, kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rawpaged.backend import Backend, KVScales
from rawpaged.config import EngineConfig
from rawpaged.devices import open_backend
from rawpaged.engine.admission import Admission
from rawpaged.engine.dry_run import run_largest_steps
from rawpaged.engine.engine import Engine
from rawpaged.engine.engine_thread import EngineThread
from rawpaged.engine.memory_plan import (
    Measured,
    MemoryPlan,
    check_memory,
    is_measured,
    keeps_quantized,
    make_plan,
    preemption_mode,
    resolve_dtype,
    resolve_kv_cache_dtype,
    resolve_weight_sizes,
    scheduler_config,
)
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.engine.output_processor import OutputProcessor
from rawpaged.engine.preemption_costs import measure_costs
from rawpaged.engine.stats import StatsLogger
from rawpaged.engine.warm_up import warm_up
from rawpaged.errors import BackendError, CheckpointError, ConfigError, RawpagedError
from rawpaged.models.config import ModelConfig
from rawpaged.models.weights import LlamaWeights
from rawpaged.tokenization.gguf_tokenizer import load_tokenizer_from_gguf
from rawpaged.tokenization.tokenizer import Tokenizer, load_tokenizer_from_directory
from rawpaged.weights.checkpoint import Checkpoint, open_checkpoint, read_outline
from rawpaged.weights.kv_scales import read_kv_scales
from rawpaged.weights.loader import dummy_weights, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine on its thread, and what its users need to know of it."""

    thread: EngineThread
    admission: Admission
    plan: MemoryPlan
    model_config: ModelConfig
    tokenizer: Tokenizer | None


def load_engine(config: EngineConfig, stats_logger: StatsLogger | None = None) -> LoadedEngine:
    """Open everything in the order in which it can fail cheaply.

    The checkpoint and every flag are checked before weights are read or the pool is allocated.
    Raises CheckpointError, ConfigError or BackendError and leaves nothing running.
    """
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, load_format=config.load_format
    )
    model = checkpoint.model_config
    tokenizer = _load_tokenizer(config, checkpoint)
    backend = _open_backend(config, model, config.num_threads)
    try:
        plan, runner = _make_runner(config, checkpoint, backend)
        costs = measure_costs(runner) if preemption_mode(config) == "auto" else None
    except MemoryError as error:
        failure: RawpagedError = BackendError(f"out of memory while starting: {error}")
    except RawpagedError as error:
        failure = error.with_traceback(None)
    except BaseException:
        backend.close()
        raise
    else:
        limits = scheduler_config(config, plan, costs)
        engine = Engine(limits, runner, stats_logger)
        admission = Admission(model, tokenizer, plan.max_model_len, config.max_logprobs, limits)
        thread = EngineThread(engine, OutputProcessor(tokenizer), admission)
        return LoadedEngine(thread, admission, plan, model, tokenizer)
    # Out of the handler, and without the traceback, which would hold what has been allocated.
    backend.close()
    raise failure


def _make_runner(
    config: EngineConfig, checkpoint: Checkpoint, backend: Backend
) -> tuple[MemoryPlan, ModelRunner]:
    """The memory plan, and a runner that is ready. Raises MemoryError too."""
    model = checkpoint.model_config
    sizes = resolve_weight_sizes(config, model, backend, checkpoint.tensors)
    plan = make_plan(config, model, backend, sizes=sizes)
    check_memory(plan, backend)
    kv_scales: Sequence[KVScales] | None = read_kv_scales(checkpoint, backend.kv_cache_dtype)
    logger.info("%s: %s\n%s", config.model, model.architecture, plan.describe())
    if config.max_num_batched_tokens < config.max_num_seqs:
        logger.warning(
            "max_num_batched_tokens=%d is less than max_num_seqs=%d: a step has no token for each "
            "request when that many run",
            config.max_num_batched_tokens,
            config.max_num_seqs,
        )
    others_bytes = _used_bytes(backend)
    started = time.monotonic()
    weights = _load_weights(config, checkpoint, backend)
    seconds, size = time.monotonic() - started, weights.nbytes / 1e9
    logger.info("%.2f GB of weights in %.1f s, %.2f GB/s", size, seconds, size / seconds)
    new_runner = partial(
        ModelRunner,
        model,
        weights,
        backend,
        block_size=plan.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        batch_invariant=config.batch_invariant and config.device != "cpu",
        async_scheduling=config.device != "cpu" and config.async_scheduling is not False,
        progress=True,
        reload_weights=_reloader(config, checkpoint, backend),
    )
    logger.info("preparing kernels; an installation's first start compiles them, once")
    started = time.monotonic()
    if is_measured(config):
        small = replace(plan, num_blocks=1)
        runner = new_runner(
            num_blocks=1,
            max_model_len=plan.max_model_len,
            kv_scales=kv_scales,
            enforce_eager=True,
        )
        kv_scales = runner.kv_scales
        used_bytes = _used_by_largest_steps(config, small, runner)
        measured = Measured(
            others_bytes=others_bytes,
            weights_bytes=weights.nbytes,
            workspace_bytes=used_bytes - others_bytes - weights.nbytes - small.kv_bytes,
        )
        plan = make_plan(config, model, backend, measured, sizes)
        logger.info("after a dry run of the largest steps\n%s", plan.describe())
    runner = new_runner(
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        kv_scales=kv_scales,
        num_host_blocks=plan.num_host_blocks,
        enforce_eager=config.enforce_eager,
    )
    warm_up(runner)
    logger.info("kernels ready in %.1f s", time.monotonic() - started)
    return plan, runner


def _used_by_largest_steps(config: EngineConfig, plan: MemoryPlan, runner: ModelRunner) -> int:
    """Bytes of the device that are in use at most, weights and others' included; ends the runner.

    The device's pool holds on to whatever a step has needed at any time, so they show at the end.
    """
    run_largest_steps(
        runner,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        max_logprobs=config.max_logprobs,
    )
    used_bytes = _used_bytes(runner.backend)
    runner.free()
    return used_bytes


def _used_bytes(backend: Backend) -> int:
    available, total = backend.memory_info()
    return total - available


def plan_only(config: EngineConfig) -> tuple[ModelConfig, MemoryPlan]:
    """The memory plan of a model whose weights need not be here."""
    model, tensors = read_outline(config.model, revision=config.revision)
    backend = _open_backend(config, model, num_threads=1)
    try:
        if config.load_format == "dummy":
            tensors = None
        sizes = resolve_weight_sizes(config, model, backend, tensors)
        return model, make_plan(config, model, backend, sizes=sizes)
    finally:
        backend.close()


def _open_backend(config: EngineConfig, model: ModelConfig, num_threads: int | None) -> Backend:
    dtype = resolve_dtype(config, model)
    return open_backend(
        config.device,
        dtype=dtype,
        kv_cache_dtype=resolve_kv_cache_dtype(config, dtype),
        num_threads=num_threads,
    )


def _load_weights(config: EngineConfig, checkpoint: Checkpoint, backend: Backend) -> LlamaWeights:
    if config.load_format == "dummy":
        return dummy_weights(checkpoint.model_config, backend, seed=config.seed)
    return load_weights(checkpoint, backend, keep_quantized=keeps_quantized(config))


def _reloader(
    config: EngineConfig, checkpoint: Checkpoint, backend: Backend
) -> Callable[[], LlamaWeights]:
    """Reads the same files again; keeps none of them open."""
    path, model = checkpoint.path.absolute(), checkpoint.model_config

    def reload() -> LlamaWeights:
        again = open_checkpoint(str(path), load_format=config.load_format, progress=False)
        if again.model_config != model:
            raise CheckpointError(f"{path}: the model's configuration is not that of the start")
        return _load_weights(config, again, backend)

    return reload


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The chosen tokenizer, the checkpoint's own, or None if it has none."""
    template = config.chat_template
    if config.tokenizer is not None:
        return load_tokenizer_from_directory(Path(config.tokenizer), chat_template=template)
    if checkpoint.gguf_metadata is not None:
        return load_tokenizer_from_gguf(checkpoint.gguf_metadata, chat_template=template)
    if checkpoint.tokenizer_directory is not None:
        return load_tokenizer_from_directory(
            checkpoint.tokenizer_directory, chat_template=template
        )
    if template is not None:
        raise ConfigError(f"chat_template needs a tokenizer, and {config.model} has none")
    logger.warning("%s has no tokenizer.json: prompts must be token ids", config.model)
    return None
