"""config.json -> ModelConfig: every default, both rope shapes, and refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rawpaged.errors import CheckpointError
from rawpaged.models.config import ModelConfig, RopeConfig
from rawpaged.models.hf_config import parse_hf_config

TINY = Path(__file__).parents[1] / "golden" / "tiny"
REQUIRED = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
HUGE = pytest.param(10**5000, id="huge")  # Python refuses to print it
FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **REQUIRED, **changes}


def parse(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    return parse_hf_config(config(architecture, **changes))


def refusal(values: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_hf_config(values, generation)
    return str(caught.value)


def read_tiny(name: str) -> ModelConfig:
    files = [TINY / name / file for file in ("config.json", "generation_config.json")]
    return parse_hf_config(*(json.loads(file.read_text()) for file in files))


def test_llama_defaults() -> None:
    assert parse() == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope=RopeConfig(rope_type="default", rope_theta=10000.0),
        tie_word_embeddings=False,
        sliding_windows=(None, None, None),
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=frozenset({2}),
    )


def test_mistral_defaults() -> None:
    parsed = parse("MistralForCausalLM", num_attention_heads=16)
    assert parsed.num_kv_heads == 8
    assert parsed.head_dim == 4
    assert parsed.max_position_embeddings == 131072
    assert parsed.sliding_windows == (4096,) * 3
    assert (parsed.bos_token_id, parsed.eos_token_ids) == (1, frozenset({2}))
    assert not any((parsed.qkv_bias, parsed.o_bias, parsed.mlp_bias, parsed.qk_norm))


def test_qwen2_defaults() -> None:
    parsed = parse("Qwen2ForCausalLM")
    assert parsed.num_kv_heads == 4
    assert parsed.head_dim == 16
    assert parsed.max_position_embeddings == 32768
    assert parsed.qkv_bias
    assert not any((parsed.o_bias, parsed.mlp_bias, parsed.qk_norm, parsed.tie_word_embeddings))
    assert parsed.sliding_windows == (None,) * 3
    assert (parsed.bos_token_id, parsed.eos_token_ids) == (None, frozenset())
    assert parsed.rope == RopeConfig()


def test_qwen3_defaults() -> None:
    parsed = parse("Qwen3ForCausalLM")
    assert parsed.head_dim == 128
    assert parsed.qk_norm
    assert not any((parsed.qkv_bias, parsed.o_bias, parsed.mlp_bias))


@pytest.mark.parametrize("family", FAMILIES)
def test_null_kv_heads_mean_multi_head_attention(family: str) -> None:
    assert parse(family, num_key_value_heads=None).num_kv_heads == 4


def test_biases() -> None:
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = parse("Qwen3ForCausalLM", attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)


def test_architecture_from_model_type() -> None:
    values = config()
    del values["architectures"]
    assert parse_hf_config({**values, "model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"
    assert "model_type='mamba'" in refusal({**values, "model_type": "mamba"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": None}, "float32"),
    ],
)
def test_dtype(given: dict[str, Any], expected: str) -> None:
    assert parse(**given).dtype == expected


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (7, None, {7}),
        ([7, 8], None, {7, 8}),
        (7, {"eos_token_id": [8, 9]}, {7, 8, 9}),
        (None, {"eos_token_id": 9}, {9}),
        (None, None, set()),
    ],
)
def test_eos_is_the_union(own: Any, generation: Any, expected: set[int]) -> None:
    assert parse_hf_config(config(eos_token_id=own), generation).eos_token_ids == expected


def test_default_eos_only_where_no_file_mentions_one() -> None:
    assert parse_hf_config(config(), {"eos_token_id": 9}).eos_token_ids == {9}
    assert parse_hf_config(config(), {"temperature": 0.6}).eos_token_ids == {2}


# Rotary embedding

LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("default", {}), ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)],
)
def test_both_rope_shapes_mean_the_same(kind: str, scaling: dict[str, Any]) -> None:
    expected = RopeConfig(rope_type=kind, rope_theta=5e5, **scaling)
    new = parse(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **scaling})
    old = parse(rope_theta=5e5, rope_scaling={"rope_type": kind, **scaling})
    older = parse(rope_theta=500000, rope_scaling={"type": kind, **scaling})
    assert new.rope == old.rope == older.rope == expected


def test_theta_in_rope_parameters_wins() -> None:
    rope = {"rope_type": "default", "rope_theta": 3e4}
    assert parse(rope_theta=2e4, rope_parameters=rope).rope.rope_theta == 3e4
    assert parse(rope_theta=2e4, rope_parameters={"rope_type": "default"}).rope.rope_theta == 2e4
    assert parse(rope_scaling=None).rope.rope_theta == 1e4


def test_yarn_defaults() -> None:
    rope = parse(max_position_embeddings=512, rope_scaling={"type": "yarn", "factor": 4}).rope
    assert rope == RopeConfig(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=512
    )
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor is rope.mscale is rope.mscale_all_dim is None


def test_yarn_factor_from_the_two_lengths() -> None:
    scaling = {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert parse(max_position_embeddings=512, rope_scaling=scaling).rope.factor == 8.0


def test_yarn_in_full() -> None:
    given = {
        **YARN, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0,
        "mscale_all_dim": 0.5, "truncate": False,
    }  # fmt: skip
    assert parse(rope_scaling={"type": "yarn", **given}).rope == RopeConfig(
        rope_type="yarn", **given
    )


def test_original_length_beside_the_rope_object_wins() -> None:
    parsed = parse(rope_scaling={"type": "yarn", **YARN}, original_max_position_embeddings=32)
    assert parsed.rope.original_max_position_embeddings == 32


# Sliding windows


def test_mistral_window() -> None:
    assert parse("MistralForCausalLM", num_key_value_heads=2, sliding_window=24).sliding_windows
    without = parse("MistralForCausalLM", num_key_value_heads=2, sliding_window=None)
    assert without.sliding_windows == (None,) * 3


def test_llama_has_no_window() -> None:
    assert parse(sliding_window=24).sliding_windows == (None,) * 3


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(family: str) -> None:
    assert parse(family, sliding_window=24).sliding_windows == (None,) * 3
    used = {"use_sliding_window": True, "sliding_window": 24}
    assert parse(family, **used).sliding_windows == (None,) * 3  # layers from 28 on
    assert parse(family, **used, max_window_layers=1).sliding_windows == (None, 24, 24)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse(family, **used, layer_types=layer_types).sliding_windows == (24, None, 24)
    unused = {"use_sliding_window": False, "layer_types": layer_types}
    assert parse(family, **unused).sliding_windows == (None,) * 3


# Scales of the KV cache


def kv_scheme(**changes: Any) -> dict[str, Any]:
    """What llm-compressor writes where only the KV cache is quantised, with changes."""
    scheme: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
        "group_size": None,
    }
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    for key, value in changes.items():
        (scheme if key in scheme else config)[key] = value
    return {"quantization_config": config}


@pytest.mark.parametrize("family", FAMILIES)
def test_types_of_kv_scales(family: str) -> None:
    heads = {"num_key_value_heads": 2}
    assert parse(family, **heads).kv_scale_dtype is None
    assert parse(family, **heads, **kv_scheme()).kv_scale_dtype == "fp8_e4m3"
    of_heads = kv_scheme(type="int", strategy="attn_head")
    assert parse(family, **heads, **of_heads).kv_scale_dtype == "int8"


# Refusals


@pytest.mark.parametrize(
    ("changes", "in_message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": []}, ["architectures=[]"]),
        ({"architectures": [3]}, ["architectures=[3]"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures="]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "GGUF"]),
        ({"quantization_config": [1]}, ["quantization_config=[1]", "object"]),
        ({"compression_config": {"format": "dense"}}, ["compression_config", "GGUF"]),
        (kv_scheme(config_groups={"group_0": {}}), ["quantization_config", "GGUF"]),
        (kv_scheme(sparsity_config={"format": "sparse"}), ["quantization_config", "GGUF"]),
        (kv_scheme(kv_cache_scheme=None), ["kv_cache_scheme", "object"]),
        (kv_scheme(num_bits=4), ["'float' of 4 bits", "8 bits"]),
        (kv_scheme(type="uint"), ["'uint' of 8 bits"]),
        (kv_scheme(type=8), ["kv_cache_scheme.type=8"]),
        (kv_scheme(num_bits="8"), ["kv_cache_scheme.num_bits='8'"]),
        (kv_scheme(dynamic=True), ["kv_cache_scheme.dynamic=True"]),
        (kv_scheme(symmetric=False), ["kv_cache_scheme.symmetric=False"]),
        (kv_scheme(strategy="channel"), ["strategy='channel'", "attn_head"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"torch_dtype": 16}, ["torch_dtype=16"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ["rope_parameters.partial"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "yarn"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["'longrope'", "llama3"]),
        ({"rope_scaling": {"type": 3}}, ["rope_scaling.type=3"]),
        ({"rope_scaling": [1]}, ["rope_scaling=[1]"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor=0"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor='2'"]),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, ["factor=nan"]),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, ["factor=inf"]),
        ({"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 1.0}}, ["high_freq"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor is missing"]),
        ({"rope_scaling": {**YARN, "type": "yarn", "beta_fast": 0.5}}, ["beta_fast=0.5"]),
        ({"rope_scaling": {**YARN, "type": "yarn", "truncate": 1}}, ["truncate=1"]),
        ({"rope_theta": 1.0}, ["rope_theta=1.0"]),
        ({"rope_theta": -5}, ["rope_theta=-5"]),
        ({"rope_theta": True}, ["rope_theta=True"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"num_attention_heads": 3}, ["hidden_size=64", "num_attention_heads=3"]),
        ({"head_dim": 15}, ["head_dim=15", "odd"]),
        ({"hidden_size": 60}, ["head_dim=15", "odd"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps='1e-6'"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'"]),
        ({"attention_bias": 1}, ["attention_bias=1"]),
        ({"eos_token_id": 320}, ["eos_token_id=320"]),
        ({"eos_token_id": [1, "2"]}, ["eos_token_id='2'"]),
        ({"bos_token_id": -1}, ["bos_token_id=-1"]),
    ],
)
def test_refused(changes: dict[str, Any], in_message: list[str]) -> None:
    message = refusal(config(**changes))
    assert all(part in message for part in in_message), message


@pytest.mark.parametrize("key", [*REQUIRED, "num_key_value_heads", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, 10**30, HUGE, 1.5, "64", True, [], {}])
def test_hostile_sizes(key: str, value: Any) -> None:
    started = time.perf_counter()
    message = refusal(config(**{key: value}))
    assert key in message
    assert len(message) < 300
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_sizes(key: str) -> None:
    values = config()
    del values[key]
    assert refusal(values) == f"{key} is missing"


def test_generation_config_is_checked_and_named() -> None:
    assert "generation_config.eos_token_id=-1" in refusal(config(), {"eos_token_id": -1})


@pytest.mark.parametrize(
    ("changes", "in_message"),
    [
        ({"layer_types": ["full_attention"]}, "must list 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "full_attention"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"sliding_window": "24"}, "sliding_window='24'"),
        ({"max_window_layers": -1}, "max_window_layers=-1"),
        ({"use_sliding_window": 1}, "use_sliding_window=1"),
    ],
)
def test_refused_windows(changes: dict[str, Any], in_message: str) -> None:
    values = config("Qwen2ForCausalLM", **{"use_sliding_window": True, **changes})
    assert in_message in refusal(values)


def test_mistral_with_layers_of_both_kinds_is_refused() -> None:
    mixed = ["sliding_attention", "full_attention", "full_attention"]
    values = config("MistralForCausalLM", num_key_value_heads=4, layer_types=mixed)
    assert "layer_types" in refusal(values)


# Files that transformers wrote


@pytest.mark.parametrize("name", sorted(path.name for path in TINY.iterdir()))
def test_golden_checkpoints_parse(name: str) -> None:
    parsed = read_tiny(name)
    assert (parsed.hidden_size, parsed.num_layers, parsed.vocab_size) == (64, 3, 320)
    assert parsed.eos_token_ids == {2}
    assert parsed.max_position_embeddings == 512


def test_golden_particulars() -> None:
    assert read_tiny("llama").rope == RopeConfig()
    assert read_tiny("llama_tied_hd32").head_dim == 32
    assert read_tiny("llama_tied_hd32").tie_word_embeddings
    assert read_tiny("llama31_rope").rope == RopeConfig(
        rope_type="llama3", rope_theta=500000.0, **LLAMA3
    )
    assert read_tiny("llama_yarn").rope == RopeConfig(rope_type="yarn", **YARN)
    biased = read_tiny("llama_mha_bias")
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    assert read_tiny("llama_mqa").num_kv_heads == 1
    assert read_tiny("mistral_sw").sliding_windows == (24, 24, 24)
    assert read_tiny("qwen2").qkv_bias
    assert read_tiny("qwen3").qk_norm
