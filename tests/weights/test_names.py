"""Completeness of a checkpoint is known before anything is read."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.errors import CheckpointError
from rawpaged.weights.names import MAX_LISTED, expected_shapes, validate_tensors
from tests.weights.builders import TINY_NAMES, tiny_config, tiny_tensors


class Shapes:
    """A TensorSource that has shapes and types but no data."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], bad: tuple[str, ...] = ()) -> None:
        self.names = shapes.keys()
        self._shapes = shapes
        self._bad = bad

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return "I64" if name in self._bad else "F32"

    def nbytes(self, name: str) -> int:
        return 4 * prod(self._shapes[name])

    def file_of(self, name: str) -> Path:
        return Path("/m/model.safetensors")

    def stored_name(self, name: str) -> str:
        return name

    def is_supported(self, name: str) -> bool:
        return name not in self._bad

    def read(self, name: str) -> npt.NDArray[np.float32]:
        raise AssertionError("a tensor was read")

    def read_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        raise AssertionError("a tensor was read")


@pytest.mark.parametrize("name", TINY_NAMES)
def test_expected_shapes_are_those_of_transformers(name: str) -> None:
    config = tiny_config(name)
    shapes = {tensor: array.shape for tensor, array in tiny_tensors(name).items()}
    assert expected_shapes(config) == shapes
    assert sum(prod(shape) for shape in shapes.values()) == config.num_parameters


def complaint(source: Shapes) -> str:
    with pytest.raises(CheckpointError) as caught:
        validate_tensors(tiny_config("llama"), source, "/m")
    return str(caught.value)


def test_missing_tensors_are_listed() -> None:
    shapes = expected_shapes(tiny_config("llama"))
    del shapes["model.layers.1.mlp.up_proj.weight"]
    del shapes["lm_head.weight"]
    message = complaint(Shapes(shapes))
    assert message.startswith("/m: tensors are missing: ")
    assert "model.layers.1.mlp.up_proj.weight, lm_head.weight" in message


def test_long_lists_are_cut() -> None:
    total = len(expected_shapes(tiny_config("llama")))
    assert complaint(Shapes({})).endswith(f"and {total - MAX_LISTED} more")


def test_wrong_shapes_are_listed() -> None:
    shapes = expected_shapes(tiny_config("llama"))
    shapes["model.norm.weight"] = (65,)
    shapes["model.layers.0.self_attn.k_proj.weight"] = (64, 32)
    message = complaint(Shapes(shapes))
    assert "/m/model.safetensors: tensor 'model.norm.weight' has shape [65]" in message
    assert "the configuration asks for [64]" in message
    assert "k_proj.weight' has shape [64, 32]" in message


def test_unsupported_type_is_named() -> None:
    shapes = expected_shapes(tiny_config("llama"))
    message = complaint(Shapes(shapes, bad=("model.norm.weight",)))
    assert "'model.norm.weight' has unsupported type I64" in message


def test_unknown_tensors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    shapes = expected_shapes(tiny_config("llama"))
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    with caplog.at_level(logging.WARNING):
        validate_tensors(tiny_config("llama"), Shapes(shapes), "/m")
    assert not caplog.records
    shapes["model.layers.9.mlp.up_proj.weight"] = (112, 64)
    with caplog.at_level(logging.WARNING):
        validate_tensors(tiny_config("llama"), Shapes(shapes), "/m")
    assert "model.layers.9.mlp.up_proj.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_tied_head_may_be_stored_twice(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("llama_tied_hd32")
    shapes = {**expected_shapes(config), "lm_head.weight": (320, 64)}
    validate_tensors(config, Shapes(shapes), "/m")
    assert not caplog.records
