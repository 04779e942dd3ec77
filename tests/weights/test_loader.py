"""What the loader hands to a backend."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rawpaged.errors import CheckpointError
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.loader import dummy_weights, load_weights
from tests.weights.builders import (
    TINY,
    TINY_NAMES,
    KeepingBackend,
    tiny_config,
    tiny_tensors,
    write_gguf,
)

BACKEND: Any = KeepingBackend()


def check_layer(layer: Any, tensors: dict[str, Any], prefix: str) -> None:
    def joined(kind: str, *parts: str) -> Any:
        arrays: list[Any] = [tensors.get(f"{prefix}{part}.{kind}") for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    attention = [f"self_attn.{part}_proj" for part in "qkv"]
    for linear, parts in (
        (layer.qkv_proj, attention),
        (layer.o_proj, ["self_attn.o_proj"]),
        (layer.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
        (layer.down_proj, ["mlp.down_proj"]),
    ):
        np.testing.assert_array_equal(linear.weight, joined("weight", *parts))
        bias = joined("bias", *parts)
        assert (linear.bias is None) == (bias is None)
        if bias is not None:
            np.testing.assert_array_equal(linear.bias, bias)
    for norm, part in (
        (layer.input_layernorm, "input_layernorm"),
        (layer.post_attention_layernorm, "post_attention_layernorm"),
        (layer.q_norm, "self_attn.q_norm"),
        (layer.k_norm, "self_attn.k_norm"),
    ):
        expected = tensors.get(f"{prefix}{part}.weight")
        assert (norm is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(norm, expected)
            assert norm.dtype == np.float32


@pytest.mark.parametrize("as_gguf", [False, True])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_all_weights_arrive(name: str, as_gguf: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", name) if as_gguf else TINY / name
    weights: Any = load_weights(open_checkpoint(str(path)), BACKEND)
    tensors = tiny_tensors(name)
    np.testing.assert_array_equal(
        weights.embed_tokens.weight, tensors["model.embed_tokens.weight"]
    )
    np.testing.assert_array_equal(weights.norm, tensors["model.norm.weight"])
    if tiny_config(name).tie_word_embeddings:
        assert weights.lm_head is weights.embed_tokens
    else:
        np.testing.assert_array_equal(weights.lm_head.weight, tensors["lm_head.weight"])
    assert len(weights.layers) == 3
    for index, layer in enumerate(weights.layers):
        check_layer(layer, tensors, f"model.layers.{index}.")
    assert weights.nbytes == sum(array.nbytes for array in tensors.values())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_stored_type_is_kept(tmp_path: Path, dtype: Any) -> None:
    tensors = {name: array.astype(dtype) for name, array in tiny_tensors("llama").items()}
    (tmp_path / "config.json").write_bytes((TINY / "llama" / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    weights: Any = load_weights(open_checkpoint(str(tmp_path)), BACKEND)
    assert weights.layers[0].qkv_proj.weight.dtype == dtype
    assert weights.embed_tokens.weight.dtype == dtype
    assert weights.norm.dtype == np.float32
    check_layer(weights.layers[2], tensors, "model.layers.2.")


def test_parts_of_different_types(tmp_path: Path) -> None:
    tensors = tiny_tensors("llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    mixed = {**tensors, name: tensors[name].astype(ml_dtypes.bfloat16)}
    (tmp_path / "config.json").write_bytes((TINY / "llama" / "config.json").read_bytes())
    save_file(mixed, tmp_path / "model.safetensors")
    weights: Any = load_weights(open_checkpoint(str(tmp_path)), BACKEND)
    assert weights.layers[0].qkv_proj.weight.dtype == np.float32
    check_layer(weights.layers[0], mixed, "model.layers.0.")


def test_dummy_checkpoint_has_nothing_to_load() -> None:
    opened = open_checkpoint(str(TINY / "llama"), load_format="dummy")
    with pytest.raises(CheckpointError, match="dummy"):
        load_weights(opened, BACKEND)


@pytest.mark.parametrize("name", ["llama", "llama_mha_bias", "llama_tied_hd32", "qwen3"])
def test_dummy_weights(name: str) -> None:
    config = tiny_config(name)
    one: Any = dummy_weights(config, BACKEND, seed=1)
    same: Any = dummy_weights(config, BACKEND, seed=1)
    other: Any = dummy_weights(config, BACKEND, seed=2)
    weight = one.layers[1].qkv_proj.weight
    np.testing.assert_array_equal(weight, same.layers[1].qkv_proj.weight)
    assert not np.array_equal(weight, other.layers[1].qkv_proj.weight)
    assert not np.array_equal(weight, one.layers[2].qkv_proj.weight)
    assert one.nbytes == 4 * config.num_parameters
    assert weight.std() == pytest.approx(0.02, rel=0.1)
    norms = [one.norm, one.layers[0].input_layernorm]
    norms += [one.layers[0].q_norm, one.layers[0].k_norm] if config.qk_norm else []
    for norm in norms:
        assert np.abs(norm - 1).max() < 0.2
    assert (one.lm_head is one.embed_tokens) == config.tie_word_embeddings


class DroppingBackend:
    """Keeps nothing, so that memory in use is what the loader itself holds."""

    def pack_linear(self, weight: Any, bias: Any) -> Any:
        return object()

    def upload(self, array: Any) -> Any:
        return object()


def test_memory_beside_the_packed_copy(tmp_path: Path) -> None:
    """Loading never holds more than one layer: reads are views of the mapped file."""
    checkpoint = open_checkpoint(str(TINY / "llama"))
    layer_bytes = sum(
        array.nbytes for name, array in tiny_tensors("llama").items() if "layers.0." in name
    )
    backend: Any = DroppingBackend()
    load_weights(checkpoint, backend)  # imports and caches first
    tracemalloc.start()
    try:
        load_weights(checkpoint, backend)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < layer_bytes


def test_no_bar_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    load_weights(open_checkpoint(str(TINY / "llama")), BACKEND, progress=True)
    assert capfd.readouterr() == ("", "")


def test_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load_weights(open_checkpoint(str(TINY / "llama")), BACKEND, progress=False)
    assert capsys.readouterr().err == ""
    load_weights(open_checkpoint(str(TINY / "llama")), BACKEND, progress=True)
    assert "100%" in capsys.readouterr().err
