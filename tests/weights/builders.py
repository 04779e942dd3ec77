"""Makes checkpoint files, good and bad, and a backend that keeps what it is given."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from rawpaged.models.config import ModelConfig
from rawpaged.models.hf_config import parse_hf_config
from rawpaged.weights.gguf import gguf_name

TINY = Path(__file__).parents[1] / "golden" / "tiny"
TINY_NAMES = sorted(path.name for path in TINY.iterdir())
GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def tiny_tensors(name: str) -> dict[str, npt.NDArray[Any]]:
    """What the `safetensors` library reads."""
    tensors: dict[str, npt.NDArray[Any]] = load_file(TINY / name / "model.safetensors")
    return tensors


def tiny_config(name: str) -> ModelConfig:
    return parse_hf_config(json.loads((TINY / name / "config.json").read_text()))


# Safetensors


def write_checkpoint(
    directory: Path,
    name: str,
    *,
    extra: Mapping[str, npt.NDArray[Any]],
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A golden checkpoint with more tensors, and other fields in its config.json."""
    config = json.loads((TINY / name / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(changes or {})))
    save_file(tiny_tensors(name) | dict(extra), directory / "model.safetensors")
    return directory


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with the given header: an object to be written as JSON, or the bytes themselves."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# GGUF


def permute(array: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """What llama.cpp's converter does to the rows of q and k of a Llama."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def quantize(array: npt.NDArray[Any], type_name: str) -> tuple[npt.NDArray[Any], Any]:
    """The array in the type, or in F32 where its rows are no multiple of the type's blocks."""
    kind = gguf.GGMLQuantizationType[type_name]
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    if array.ndim == 1 or array.shape[-1] % block_size:
        kind = gguf.GGMLQuantizationType.F32
    return gguf.quantize(np.ascontiguousarray(array, np.float32), kind), kind


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """What a converter writes for the model; keys of the architecture without their prefix."""
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope.rope_theta,
    }
    if config.sliding_windows[0]:
        values["attention.sliding_window"] = config.sliding_windows[0]
    if config.rope.rope_type == "yarn":
        values["rope.scaling.type"] = "yarn"
        values["rope.scaling.factor"] = config.rope.factor
        original = config.rope.original_max_position_embeddings
        values["rope.scaling.original_context_length"] = original
    return values


def write_gguf(
    path: Path,
    name: str = "llama",
    type_name: str = "F32",
    *,
    architecture: str | None = None,
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, tuple[npt.NDArray[Any], Any]] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """A golden checkpoint as a GGUF file. `changes` to the metadata: None takes a key out."""
    config = tiny_config(name)
    architecture = architecture or GGUF_ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {f"{architecture}.{key}": v for key, v in gguf_metadata(config).items()}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    metadata |= {"tokenizer.ggml.tokens": ["a", "\u0120b"], "tokenizer.ggml.add_bos_token": False}
    metadata |= {"tokenizer.ggml.scores": [0.5, -1.0], "tokenizer.chat_template": "{{ x }}"}
    for key, value in (metadata | dict(changes or {})).items():
        if value is not None:
            add_key(writer, key, value)
    for hf_name, array in tiny_tensors(name).items():
        if gguf_name(hf_name) in without:
            continue
        if architecture == "llama" and (".q_proj." in hf_name or ".k_proj." in hf_name):
            is_query = ".q_proj." in hf_name
            array = permute(array, config.num_heads if is_query else config.num_kv_heads)
        data, kind = quantize(array, type_name)
        writer.add_tensor(gguf_name(hf_name), data, raw_dtype=kind)
    for extra_name, (data, kind) in (extra or {}).items():
        writer.add_tensor(extra_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def gguf_value(kind: int, payload: bytes) -> bytes:
    return struct.pack("<I", kind) + payload


def gguf_text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_header(
    keys: bytes = b"",
    tensors: bytes = b"",
    *,
    num_keys: int = 0,
    num_tensors: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """Raw header bytes, whose counts need not be true."""
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors


# A backend


@dataclass(frozen=True, slots=True)
class KeptLinear:
    weight: npt.NDArray[Any]
    bias: npt.NDArray[Any] | None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class KeepingBackend:
    """Packs by copying, so that a test can see what the loader handed over."""

    def pack_linear(
        self, weight: npt.NDArray[Any], bias: npt.NDArray[Any] | None
    ) -> KeptLinear:
        return KeptLinear(weight.copy(), None if bias is None else bias.copy())

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.copy()
