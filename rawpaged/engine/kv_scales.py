"""Scales of a quantised KV cache by calibration: how large keys and values of this model are.

One forward pass over fixed token ids with a cache of the weights' type; a head's scale is such that
the largest magnitude met, times a margin, is the largest that an element can be. The same model on
the same device always gets the same scales, so that a request's answer survives a restart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rawpaged.backend import LARGEST_ELEMENT, Backend, BatchMeta, KVScales
from rawpaged.errors import CheckpointError
from rawpaged.models.config import ModelConfig
from rawpaged.models.llama import Llama

logger = logging.getLogger(__name__)

CALIBRATION_TOKENS = 256
MARGIN = {"fp8_e4m3": 2.0, "int8": 1.25}
"""Largest magnitude that is kept over the largest in calibration (docs/kv-cache.md).

Room costs FP8 nothing, as its steps are relative; for int8 every step grows with it.
"""


def calibration_token_ids(config: ModelConfig, count: int) -> npt.NDArray[np.int32]:
    """The model's BOS, if it has one, and ids spread evenly over the vocabulary.

    Id i is floor(frac(i * 0x9E3779B1 / 2**32) * vocab_size): steps of the golden ratio.
    """
    steps = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B1) % np.uint64(2**32)
    ids = (steps * np.uint64(config.vocab_size) >> np.uint64(32)).astype(np.int32)
    if config.bos_token_id is not None:
        ids[:1] = config.bos_token_id
    return ids


def calibrate_kv_scales(
    model: Llama,
    backend: Backend,
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> tuple[KVScales, ...]:
    """Scales of every layer for the backend's kv_cache_dtype.

    Takes the first CALIBRATION_TOKENS positions, or as many as max_model_len allows. Raises
    CheckpointError where keys or values are not finite.
    """
    started = time.monotonic()
    config = model.config
    token_ids = calibration_token_ids(config, min(CALIBRATION_TOKENS, max_model_len))
    num_blocks = -(-len(token_ids) // block_size)
    caches = [
        backend.new_kv_cache(num_blocks, config.num_kv_heads, config.head_dim, block_size)
        for _ in range(config.num_layers)
    ]
    for start in range(0, len(token_ids), max_num_batched_tokens):
        chunk = token_ids[start : start + max_num_batched_tokens]
        meta = _chunk_meta(chunk, start, num_blocks)
        plan = backend.plan(meta, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
        model.forward(plan, caches)
    magnitudes = [backend.kv_magnitudes(cache, len(token_ids)) for cache in caches]
    scales = scales_for(magnitudes, backend.kv_cache_dtype)
    logger.info(
        "scales of the %s KV cache calibrated on %d tokens in %.1f s",
        backend.kv_cache_dtype,
        len(token_ids),
        time.monotonic() - started,
    )
    return scales


def scales_for(
    magnitudes: Sequence[npt.NDArray[np.float32]], kv_cache_dtype: str
) -> tuple[KVScales, ...]:
    """Scales by layer from the largest keys and values f32[2, num_kv_heads]; 1 for a head of 0."""
    factor = np.float32(MARGIN[kv_cache_dtype] / LARGEST_ELEMENT[kv_cache_dtype])
    scales = []
    for layer, found in enumerate(magnitudes):
        if not np.isfinite(found).all():
            raise CheckpointError(
                f"layer {layer}: keys and values of the calibration are as large as "
                f"{found.tolist()}; with kv_cache_dtype='auto' they need no scales"
            )
        keys, values = np.where(found > 0, found * factor, np.float32(1.0))
        scales.append(KVScales(keys, values))
    return tuple(scales)


def _chunk_meta(token_ids: npt.NDArray[np.int32], start: int, num_blocks: int) -> BatchMeta:
    """One request's tokens from `start` on, in blocks in order."""
    count = len(token_ids)
    positions = np.arange(start, start + count, dtype=np.int32)
    return BatchMeta(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions.astype(np.int64),
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([start + count], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logits_rows=np.zeros(0, np.int32),
    )
