"""Scales that a checkpoint has for its KV cache, under every name, and those that are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from rawpaged.errors import CheckpointError
from rawpaged.weights.checkpoint import open_checkpoint
from rawpaged.weights.kv_scales import read_kv_scales
from tests.weights.builders import write_checkpoint

HEADS = 2
LAYERS = 3
INT8_SCHEME = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "int"},
    }
}


def scales(
    keys: str = "k_scale", values: str = "v_scale", shape: tuple[int, ...] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Another number in each layer, for keys and values, and for each head."""
    made: dict[str, npt.NDArray[Any]] = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn."
        for name, number in ((keys, 0.5), (values, 0.25)):
            one = np.full(shape, number + layer, np.float32)
            made[prefix + name] = np.asarray(one + np.arange(one.size).reshape(shape), np.float32)
    return made


def read(directory: Path, extra: dict[str, Any], **options: Any) -> list[list[list[float]]] | None:
    """Keys' and values' scales by layer."""
    kv_cache_dtype = options.pop("kv_cache_dtype", "fp8_e4m3")
    path = write_checkpoint(directory, "llama", extra=extra, **options)
    found = read_kv_scales(open_checkpoint(str(path)), kv_cache_dtype)
    if found is None:
        return None
    return [[each.keys.tolist(), each.values.tolist()] for each in found]


def refusal(directory: Path, extra: dict[str, Any], **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(directory, extra, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_is_that_of_every_head(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    keys: str,
    values: str,
    shape: tuple[int, ...],
) -> None:
    expected = [[[0.5 + i] * HEADS, [0.25 + i] * HEADS] for i in range(LAYERS)]
    assert read(tmp_path, scales(keys, values, shape)) == expected
    assert not caplog.records, "they are not among the tensors that are not used"


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 2, 1)])
def test_a_number_for_each_head(tmp_path: Path, shape: tuple[int, ...]) -> None:
    expected = [[[0.5 + i, 1.5 + i], [0.25 + i, 1.25 + i]] for i in range(LAYERS)]
    assert read(tmp_path, scales(shape=shape)) == expected


def test_one_for_both(tmp_path: Path) -> None:
    extra = {name: x for name, x in scales("kv_scale").items() if not name.endswith(".v_scale")}
    assert read(tmp_path, extra) == [[[0.5 + i] * HEADS] * 2 for i in range(LAYERS)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_types(tmp_path: Path, dtype: Any) -> None:
    extra = {name: x.astype(dtype) for name, x in scales().items()}
    assert read(tmp_path, extra) == read(tmp_path, scales())


def test_none(tmp_path: Path) -> None:
    assert read(tmp_path, {}) is None
    assert read(tmp_path, scales(), kv_cache_dtype="bfloat16") is None
    path = write_checkpoint(tmp_path, "llama", extra=scales())
    dummy = open_checkpoint(str(path), load_format="dummy")
    assert read_kv_scales(dummy, "fp8_e4m3") is None


def test_scales_are_for_the_type_that_the_config_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path, scales(), kv_cache_dtype="int8", changes=INT8_SCHEME) is not None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, scales(), changes=INT8_SCHEME) is None
    assert "its KV scales are for int8, not fp8_e4m3" in caplog.text


def test_a_layer_without(tmp_path: Path) -> None:
    extra = scales()
    del extra["model.layers.1.self_attn.v_scale"]
    message = refusal(tmp_path, extra)
    assert message.endswith("missing, though others are there: layer 1: v_scale")


def test_a_scale_that_is_there_twice(tmp_path: Path) -> None:
    message = refusal(tmp_path, scales() | scales("k_proj.k_scale"))
    assert "self_attn.k_scale' and 'model.layers.0.self_attn.k_proj.k_scale' are both" in message


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1e-10, 1e10, 1e-40], ids=str
)
def test_numbers_that_are_no_scale(tmp_path: Path, value: float) -> None:
    extra = scales()
    extra["model.layers.2.self_attn.k_scale"] = np.array(value, np.float32)
    message = refusal(tmp_path, extra)
    assert "tensor 'model.layers.2.self_attn.k_scale' holds" in message
    assert "between 1e-09 and 1e+09" in message


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 2), (1, 2, 2), (4,)], ids=str)
def test_shapes_that_are_no_scale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    extra = scales()
    extra["model.layers.0.self_attn.v_scale"] = np.ones(shape, np.float32)
    message = refusal(tmp_path, extra)
    assert f"v_scale' has shape {list(shape)}; a KV scale is one number or one" in message
    assert "2 KV heads" in message


def test_a_type_that_is_no_scale(tmp_path: Path) -> None:
    extra = scales()
    extra["model.layers.0.self_attn.v_scale"] = np.ones((), np.int32)
    assert "unsupported type I32" in refusal(tmp_path, extra)
