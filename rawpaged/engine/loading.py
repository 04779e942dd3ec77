"""From an EngineConfig to an engine that is ready: files, tokenizer, memory, weights, kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rawpaged.backend import Backend
from rawpaged.config import EngineConfig
from rawpaged.devices import open_backend
from rawpaged.engine.admission import Admission
from rawpaged.engine.engine import Engine
from rawpaged.engine.engine_thread import EngineThread
from rawpaged.engine.memory_plan import (
    MemoryPlan,
    check_memory,
    make_plan,
    resolve_dtype,
    scheduler_config,
)
from rawpaged.engine.model_runner import ModelRunner
from rawpaged.engine.output_processor import OutputProcessor
from rawpaged.engine.stats import StatsLogger
from rawpaged.engine.warm_up import warm_up
from rawpaged.errors import CheckpointError, ConfigError
from rawpaged.models.config import ModelConfig
from rawpaged.models.weights import LlamaWeights
from rawpaged.tokenization.gguf_tokenizer import load_tokenizer_from_gguf
from rawpaged.tokenization.tokenizer import Tokenizer, load_tokenizer_from_directory
from rawpaged.weights.checkpoint import Checkpoint, open_checkpoint, read_model_config
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
    backend = open_backend(
        config.device, dtype=resolve_dtype(config, model), num_threads=config.num_threads
    )
    try:
        plan = make_plan(config, model, backend)
        check_memory(plan, backend)
        logger.info("%s: %s\n%s", config.model, model.architecture, plan.describe())
        started = time.monotonic()
        weights = _load_weights(config, checkpoint, backend)
        seconds, size = time.monotonic() - started, weights.nbytes / 1e9
        logger.info("%.2f GB of weights in %.1f s, %.2f GB/s", size, seconds, size / seconds)
        logger.info("preparing kernels; an installation's first start compiles them, once")
        runner = ModelRunner(
            model,
            weights,
            backend,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=plan.max_model_len,
            enforce_eager=config.enforce_eager,
            progress=True,
            reload_weights=_reloader(config, checkpoint, backend),
        )
        started = time.monotonic()
        warm_up(runner)
        logger.info("kernels ready in %.1f s", time.monotonic() - started)
    except BaseException:
        backend.close()
        raise
    engine = Engine(scheduler_config(config, plan), runner, stats_logger)
    admission = Admission(model, tokenizer, plan.max_model_len, config.max_logprobs)
    thread = EngineThread(engine, OutputProcessor(tokenizer), admission)
    return LoadedEngine(thread, admission, plan, model, tokenizer)


def plan_only(config: EngineConfig) -> tuple[ModelConfig, MemoryPlan]:
    """The memory plan of a model whose weights need not be here."""
    model = read_model_config(config.model, revision=config.revision)
    backend = open_backend(config.device, dtype=resolve_dtype(config, model), num_threads=1)
    try:
        return model, make_plan(config, model, backend)
    finally:
        backend.close()


def _load_weights(config: EngineConfig, checkpoint: Checkpoint, backend: Backend) -> LlamaWeights:
    if config.load_format == "dummy":
        return dummy_weights(checkpoint.model_config, backend, seed=config.seed)
    return load_weights(checkpoint, backend)


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
