"""Scales of a quantised KV cache that a checkpoint brings along."""

from __future__ import annotations

import logging
from math import prod

import numpy as np
import numpy.typing as npt

from rawpaged.backend import LARGEST_ELEMENT, KVScales
from rawpaged.errors import CheckpointError
from rawpaged.models.config import ModelConfig
from rawpaged.weights.checkpoint import Checkpoint
from rawpaged.weights.names import KV_SCALES
from rawpaged.weights.tensors import TensorSource

logger = logging.getLogger(__name__)

LEAST, MOST = 1e-9, 1e9
"""A scale outside is no scale of a model that works."""


def read_kv_scales(checkpoint: Checkpoint, kv_cache_dtype: str) -> tuple[KVScales, ...] | None:
    """Every layer's scales, or None if the checkpoint has none for a cache of this type.

    A scale is one number, or one for each KV head, under a name of `names.KV_SCALES`. Scales are
    for FP8 unless the checkpoint's `kv_cache_scheme` says otherwise. Raises
    CheckpointError for a scale that is missing in some layers only, is there twice, has another
    shape, or is not a number between 1e-9 and 1e9.
    """
    tensors = checkpoint.tensors
    if tensors is None or kv_cache_dtype not in LARGEST_ELEMENT:
        return None
    config = checkpoint.model_config
    names = {
        (layer, kind): _stored_name(tensors, layer, kind)
        for layer in range(config.num_layers)
        for kind in KV_SCALES
    }
    if not any(names.values()):
        return None
    made_for = config.kv_scale_dtype or "fp8_e4m3"
    if made_for != kv_cache_dtype:
        logger.warning(
            "%s: its KV scales are for %s, not %s: others are calibrated",
            checkpoint.path,
            made_for,
            kv_cache_dtype,
        )
        return None
    missing = [f"layer {layer}: {kind}_scale" for (layer, kind), name in names.items() if not name]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: KV scales are missing, though others are there: "
            f"{', '.join(missing[:8])}"
        )
    return tuple(
        KVScales(*(_read(tensors, names[layer, kind], config) for kind in KV_SCALES))
        for layer in range(config.num_layers)
    )


def _stored_name(tensors: TensorSource, layer: int, kind: str) -> str:
    """The name of a layer's scale in the file, "" if it has none."""
    prefix = f"model.layers.{layer}.self_attn."
    found = [prefix + name for name in KV_SCALES[kind] if prefix + name in tensors.names]
    if len(found) > 1:
        raise CheckpointError(
            f"{tensors.file_of(found[0])}: tensors {found[0]!r} and {found[1]!r} are both the "
            f"{kind}_scale of layer {layer}"
        )
    return found[0] if found else ""


def _read(tensors: TensorSource, name: str, config: ModelConfig) -> npt.NDArray[np.float32]:
    """f32[num_kv_heads] of a tensor that has one number or as many."""
    file, shape, heads = tensors.file_of(name), tensors.shape(name), config.num_kv_heads
    if prod(shape) not in (1, heads) or max(shape, default=1) != prod(shape):
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {list(shape)}; a KV scale is one number or one "
            f"for each of {heads} KV heads"
        )
    if not tensors.is_supported(name):
        raise CheckpointError(f"{file}: tensor {name!r} has unsupported type {tensors.dtype(name)}")
    values = tensors.read(name).astype(np.float32).reshape(-1)
    if not ((values >= LEAST) & (values <= MOST)).all():  # NaN compares false
        raise CheckpointError(
            f"{file}: tensor {name!r} holds {values.tolist()[:8]}; KV scales lie between "
            f"{LEAST:g} and {MOST:g}. Remove the tensors to have scales calibrated"
        )
    scale: npt.NDArray[np.float32] = np.ascontiguousarray(np.broadcast_to(values, (heads,)))
    return scale
