"""Calibration: the same scales at every start, as large as keys and values ask for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawpaged import LLM, SamplingParams
from rawpaged.backend import LARGEST_ELEMENT, KVScales
from rawpaged.engine.kv_scales import MARGIN, calibration_token_ids, scales_for
from rawpaged.errors import CheckpointError
from rawpaged.weights.checkpoint import open_checkpoint
from tests.engine.helpers import TINY, request, tiny_engine
from tests.tiny import engine_of, tiny_config
from tests.weights.builders import write_checkpoint


def calibrated(name: str = "llama", kv_cache_dtype: str = "int8", **params: Any) -> list[KVScales]:
    engine = tiny_engine(name, kv_cache_dtype=kv_cache_dtype, **params)
    scales = engine.runner.kv_scales
    engine.close()
    assert scales is not None
    return list(scales)


def bits(scales: list[KVScales]) -> list[bytes]:
    return [part.tobytes() for each in scales for part in (each.keys, each.values)]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_scales_do_not_depend_on_how_it_was_run(kv_cache_dtype: str) -> None:
    once = bits(calibrated(kv_cache_dtype=kv_cache_dtype))
    cases: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 23, "num_threads": 2},
        {"max_num_batched_tokens": 512, "num_blocks": 20, "max_num_seqs": 3},
    ]
    for params in cases:
        assert bits(calibrated(kv_cache_dtype=kv_cache_dtype, **params)) == once


def test_a_head_has_the_largest_of_what_it_wrote() -> None:
    """Against the float cache of an engine that is given the same tokens as a prompt."""
    config = open_checkpoint(str(TINY / "llama"), progress=False).model_config
    token_ids = calibration_token_ids(config, 160).tolist()
    engine = tiny_engine(max_num_batched_tokens=256, max_model_len=176, num_blocks=11)
    engine.add_request(request("a", token_ids, max_tokens=2))
    engine.step()
    found = [  # where there is no poison
        [np.nanmax(np.abs(pool), axis=(0, 2, 3, 4)) for pool in (cache.keys, cache.values)]
        for cache in engine.runner.kv_caches
    ]
    engine.close()
    for kv_cache_dtype, largest in LARGEST_ELEMENT.items():
        for each, (keys, values) in zip(
            calibrated(kv_cache_dtype=kv_cache_dtype), found, strict=True
        ):
            margin = MARGIN[kv_cache_dtype]
            np.testing.assert_allclose(each.keys * largest, keys * margin, rtol=1e-6)
            np.testing.assert_allclose(each.values * largest, values * margin, rtol=1e-6)


def test_token_ids_are_those_of_the_docs() -> None:
    config = open_checkpoint(str(TINY / "llama"), progress=False).model_config
    assert config.bos_token_id == 1
    ids = calibration_token_ids(config, 256)
    expected = [i * 0x9E3779B1 % 2**32 * config.vocab_size // 2**32 for i in range(256)]
    assert ids.tolist() == [1, *expected[1:]]
    assert len(set(expected)) > 240  # of 320: spread evenly


def test_a_head_of_zeros_has_a_scale() -> None:
    magnitudes = np.array([[0.0, 2.0], [1.0, 0.0]], np.float32)
    (scales,) = scales_for([magnitudes], "int8")
    assert scales.keys[0] == scales.values[1] == 1
    assert scales.keys[1] == np.float32(2) * np.float32(MARGIN["int8"] / 127)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_cannot_be_scaled(value: float) -> None:
    magnitudes = np.array([[1.0, value], [1.0, 1.0]], np.float32)
    with pytest.raises(CheckpointError, match=r"layer 0: .*kv_cache_dtype='auto'"):
        scales_for([magnitudes], "fp8_e4m3")


def with_scales(directory: Path, value: float) -> str:
    """The tiny Llama with a scale of all keys and of all values."""
    extra = {
        f"model.layers.{layer}.self_attn.{kind}_scale": np.array(value, np.float32)
        for layer in range(3)
        for kind in "kv"
    }
    return str(write_checkpoint(directory, "llama", extra=extra))


def test_the_checkpoints_own_come_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = with_scales(tmp_path, 0.0625)
    caplog.set_level(logging.INFO)
    with LLM(tiny_config(model=directory, kv_cache_dtype="fp8")) as llm:
        caches = engine_of(llm).runner.kv_caches
        assert all((cache.key_scale == 0.0625).all() for cache in caches)
        assert all((cache.value_scale == 0.0625).all() for cache in caches)
    assert "calibrated" not in caplog.text
    assert "not used" not in caplog.text
    with LLM(tiny_config(model=directory, kv_cache_dtype="int8")) as llm:
        assert engine_of(llm).runner.kv_caches[0].key_scale[0] != 0.0625
    assert "its KV scales are for fp8_e4m3, not int8" in caplog.text
    assert "calibrated on 256 tokens" in caplog.text


def test_scales_that_no_model_has_are_refused(tmp_path: Path) -> None:
    directory = with_scales(tmp_path, float("nan"))
    with pytest.raises(CheckpointError, match=r"k_scale' holds \[nan\]"):
        LLM(tiny_config(model=directory, kv_cache_dtype="fp8"))
    with LLM(tiny_config(model=directory)) as llm:  # not read where they are not wanted
        assert engine_of(llm).runner.kv_scales is None


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_the_scales(level: int) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=2)
    prompt = [list(range(5, 60))]
    with LLM(tiny_config(kv_cache_dtype="fp8")) as llm:
        before = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        scales = engine_of(llm).runner.kv_scales
        llm.sleep(level)
        llm.wake_up()
        after = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert engine_of(llm).runner.kv_scales is scales
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
