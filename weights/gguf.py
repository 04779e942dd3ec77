"""GGUF files as a TensorSource: names mapped to Hugging Face's, quantised types decoded on read."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawpaged.errors import CheckpointError
from rawpaged.models.fields import show
from rawpaged.weights.files import map_file
from rawpaged.weights.gguf_config import GGUFTensors, parse_gguf_config
from rawpaged.weights.gguf_header import GGUFTensor, parse_header

HF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"
_DECODED_ROWS, _DECODED_ROW_BYTES = 16, 4096
"""The gguf library decodes 16 rows at a time; with rows about so long it takes half the time. Given
more rows it keeps two copies of the result for a while."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_SCALE_NAME = re.compile(r".+\.(scale|input_scale)")

# Types that need no decoding: a read is a view of the file.
PLAIN_TYPES: dict[str, npt.DTypeLike] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


_GGUF_NAMES = {hf: name for name, hf in {**HF_NAMES, **HF_LAYER_NAMES}.items()}


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that has no counterpart keeps its own."""
    if match := _LAYER_NAME.fullmatch(name):
        layer, part, kind = match.groups()
        if part in HF_LAYER_NAMES:
            return f"model.layers.{layer}.{HF_LAYER_NAMES[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{HF_NAMES[part]}.{kind}" if part in HF_NAMES else name


def gguf_name(name: str) -> str:
    """The inverse of `hf_name`."""
    part, _, kind = name.rpartition(".")
    if not part.startswith("model.layers."):
        return f"{_GGUF_NAMES[part]}.{kind}" if part in _GGUF_NAMES else name
    layer, _, part = part.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}" if part in _GGUF_NAMES else name


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor whose bytes are [start, end) of the file."""

    tensor: GGUFTensor
    type_name: str
    start: int
    end: int


class GGUFFile:
    """One GGUF file, checked on construction; a TensorSource by Hugging Face names.

    Raises CheckpointError naming the file, and the tensor where there is one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        header = parse_header(path, self._data)
        self.metadata = header.metadata
        """Keys as in the file; values str, int, float, bool or lists of them."""
        self._stored: dict[str, _Stored] = {}
        for tensor in header.tensors.values():
            stored = _locate(path, tensor, header.data_start, len(self._data))
            if self._stored.setdefault(hf_name(tensor.name), stored) is not stored:
                raise CheckpointError(f"{path}: two tensors stand for {hf_name(tensor.name)!r}")
        _refuse_unsupported(path, self.metadata, header.tensors.keys())
        tensors = GGUFTensors(
            shapes={name: tensor.shape for name, tensor in header.tensors.items()},
            dtype=self._config_dtype(),
            freq_divisors=self._rope_divisors(),
        )
        try:
            self.config = parse_gguf_config(self.metadata, tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys() - {ROPE_FREQS}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].tensor.shape

    def dtype(self, name: str) -> str:
        return self._stored[name].type_name

    def nbytes(self, name: str) -> int:
        return self._stored[name].end - self._stored[name].start

    def file_of(self, name: str) -> Path:
        return self.path

    def stored_name(self, name: str) -> str:
        return gguf_name(name)

    def is_supported(self, name: str) -> bool:
        return _can_decode(self._stored[name].tensor.type_id)

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor as Hugging Face lays it out: a view if it is stored so, else a copy.

        Quantised types come back as float32.
        """
        stored = self._stored[name]
        if not self.is_supported(name):
            raise CheckpointError(
                f"{self.path}: tensor {show(stored.tensor.name)} has type {stored.type_name}, "
                "which cannot be decoded"
            )
        plain = PLAIN_TYPES.get(stored.type_name)
        rows = self._read_rows(name, plain or np.uint8)
        return rows if plain else _decode(rows, stored.tensor.type_id)

    def read_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """u8[out_features, row_bytes]: a quantised matrix as stored, rows as in `read`."""
        return self._read_rows(name, np.uint8)

    def _read_rows(self, name: str, item: npt.DTypeLike) -> npt.NDArray[Any]:
        """[..., items of a row] as Hugging Face orders the rows."""
        stored = self._stored[name]
        shape = stored.tensor.shape
        raw = np.asarray(self._data[stored.start : stored.end]).view(item)
        rows = raw.reshape((*shape[:-1], -1)) if raw.size else raw.reshape(shape)
        num_heads = self._permuted_heads(name)
        return rows if num_heads is None else rows[_hf_row_order(shape[0], num_heads)]

    def _permuted_heads(self, name: str) -> int | None:
        """Heads whose rows the file holds in llama.cpp's order of rotary pairs; None: as in HF."""
        if self.config.architecture != "LlamaForCausalLM":
            return None
        if ".self_attn.q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".self_attn.k_proj." in name else None

    def _config_dtype(self) -> str:
        """Quantised files count as float16: their scales are."""
        stored = self._stored.get("model.layers.0.self_attn.q_proj.weight")
        type_name = stored.type_name if stored else "F16"
        return {"F32": "float32", "BF16": "bfloat16"}.get(type_name, "float16")

    def _rope_divisors(self) -> tuple[float, ...] | None:
        stored = self._stored.get(ROPE_FREQS)
        if stored is None:
            return None
        where = f"{self.path}: tensor {ROPE_FREQS!r}"
        if stored.type_name != "F32" or len(stored.tensor.shape) != 1:
            raise CheckpointError(f"{where} must be a vector of type F32")
        values = np.asarray(self._data[stored.start : stored.end]).view("<f4")
        if not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(f"{where} holds values that are not finite and positive")
        return tuple(float(value) for value in values)


def _hf_row_order(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """intp[num_rows]: which stored row is each row of the Hugging Face layout.

    Within a head llama.cpp interleaves the two halves that Hugging Face rotates against each
    other: stored row 2 * i + half is row half * head_dim / 2 + i.
    """
    pairs = num_rows // num_heads // 2
    return np.arange(num_rows).reshape(num_heads, pairs, 2).swapaxes(1, 2).ravel()


def _locate(path: Path, tensor: GGUFTensor, data_start: int, file_bytes: int) -> _Stored:
    where = f"{path}: tensor {show(tensor.name)}"
    known = _types().get(tensor.type_id)
    if known is None:
        raise CheckpointError(
            f"{where} has type number {tensor.type_id}, unknown to the installed gguf package"
        )
    type_name, block_size, block_bytes = known
    if (tensor.shape[-1] if tensor.shape else 1) % block_size:
        raise CheckpointError(
            f"{where} of type {type_name} has shape {list(tensor.shape)}; "
            f"rows must be multiples of {block_size}"
        )
    start = data_start + tensor.offset
    end = start + prod(tensor.shape) // block_size * block_bytes
    if end > file_bytes:
        raise CheckpointError(
            f"{where} ends at byte {end}, the file has {file_bytes}: it is truncated"
        )
    return _Stored(tensor, type_name, start, end)


def _refuse_unsupported(
    path: Path, metadata: dict[str, object], tensor_names: Collection[str]
) -> None:
    splits = metadata.get("split.count", 0)
    if splits not in (0, 1):
        raise CheckpointError(
            f"{path}: is one of {show(splits)} split files; merge them with llama.cpp's "
            "gguf-split --merge"
        )
    for name in tensor_names:
        if _SCALE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{path}: tensor {show(name)}: scales apart from their weights are not supported"
            )


@cache
def _types() -> dict[int, tuple[str, int, int]]:
    """Type number -> name, elements in a block, bytes of a block."""
    # Imported here: it takes 0.1 s, which a checkpoint without GGUF need not pay.
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _decode(rows: npt.NDArray[Any], type_id: int) -> npt.NDArray[Any]:
    """float32 elements of rows u8[..., row_bytes] of whole blocks."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(type_id)
    if not rows.size:
        empty: npt.NDArray[Any] = dequantize(rows, kind)
        return empty
    folded = rows.reshape(-1, rows.shape[-1])
    while 2 * folded.shape[1] <= _DECODED_ROW_BYTES and len(folded) % 2 == 0:
        folded = folded.reshape(len(folded) // 2, -1)
    _, block_size, block_bytes = _types()[type_id]
    decoded = np.empty((len(folded), folded.shape[1] // block_bytes * block_size), np.float32)
    for first in range(0, len(folded), _DECODED_ROWS):
        part = slice(first, first + _DECODED_ROWS)
        decoded[part] = dequantize(folded[part], kind)
    return decoded.reshape((*rows.shape[:-1], -1))


@cache
def _can_decode(type_id: int) -> bool:
    """Whether a read of the type will succeed.

    The gguf library knows sizes of more types than it can decode, and has no public list of the
    latter: it raises NotImplementedError for the others, so a block of zeros is tried.
    """
    type_name, _, block_bytes = _types()[type_id]
    if type_name in PLAIN_TYPES:
        return True
    try:
        _decode(np.zeros((1, block_bytes), np.uint8), type_id)
    except NotImplementedError:
        return False
    return True
