"""What a config.json says of quantisation: weights must have none, the KV cache may have scales."""

from __future__ import annotations

from rawpaged.errors import CheckpointError
from rawpaged.models.fields import Fields, show

_SCHEME_TYPES = {("float", 8): "fp8_e4m3", ("int", 8): "int8"}
_STRATEGIES = ("tensor", "attn_head")


def parse_kv_scale_dtype(fields: Fields) -> str | None:
    """The type that KV scales are for, "fp8_e4m3" or "int8"; None if nothing is said of them.

    Read from the `kv_cache_scheme` of compressed-tensors. Raises CheckpointError where weights or
    activations are quantised, and for a scheme whose scales would mean something else here.
    """
    if fields.has("compression_config"):
        raise fields.error("compression_config", _WEIGHTS)
    if not fields.has("quantization_config"):
        return None
    given = fields.values["quantization_config"]
    if not isinstance(given, dict):
        raise fields.error("quantization_config", "must be an object")
    config = Fields(given, "quantization_config.")
    if config.values.get("quant_method") != "compressed-tensors" or any(
        given.get(key) for key in ("config_groups", "sparsity_config", "transform_config")
    ):
        raise fields.error("quantization_config", _WEIGHTS)
    scheme = given.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        raise config.error("kv_cache_scheme", "must be an object where nothing else is quantised")
    return _scale_dtype(Fields(scheme, "quantization_config.kv_cache_scheme."))


_WEIGHTS = (
    "is not supported: safetensors weights must be F32, F16 or BF16 "
    "(quantised models are read as GGUF files)"
)


def _scale_dtype(scheme: Fields) -> str:
    kind, bits = scheme.text("type"), scheme.integer("num_bits", 1, 64)
    if (kind, bits) not in _SCHEME_TYPES:
        raise CheckpointError(
            f"{scheme.prefix}type={show(kind)} of {bits} bits is not supported; supported: float "
            "and int of 8 bits"
        )
    if scheme.boolean("dynamic", False):
        raise scheme.error("dynamic", "is not supported: scales must be in the checkpoint")
    if not scheme.boolean("symmetric", True):
        raise scheme.error("symmetric", "is not supported: there are no zero points here")
    if scheme.text("strategy", "tensor") not in _STRATEGIES:
        raise scheme.error("strategy", f"is not supported; supported: {', '.join(_STRATEGIES)}")
    return _SCHEME_TYPES[kind, bits]
