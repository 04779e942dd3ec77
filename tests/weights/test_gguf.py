"""GGUF files: configuration, names, row order, decoding; damaged files are refused at once."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rawpaged.errors import CheckpointError
from rawpaged.models.config import RopeConfig
from rawpaged.weights.gguf import GGUFFile, gguf_name, hf_name
from rawpaged.weights.gguf_header import MAX_ARRAY_ELEMENTS, parse_header
from rawpaged.weights.names import expected_shapes, validate_tensors
from tests.weights.builders import (
    TINY_NAMES,
    gguf_header,
    gguf_text,
    gguf_value,
    quantize,
    tiny_config,
    tiny_tensors,
    write_gguf,
)


def same_config(read: Any, expected: Any) -> bool:
    """Equal but for what GGUF does not store: eps and theta are float32, rope kinds differ."""
    return bool(
        dataclasses.replace(
            read,
            rms_norm_eps=expected.rms_norm_eps,
            rope=expected.rope,
            architecture=expected.architecture,
        )
        == expected
    )


@pytest.mark.parametrize("name", TINY_NAMES)
def test_configuration_and_tensors_survive(tmp_path: Path, name: str) -> None:
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", name))
    config = tiny_config(name)
    assert same_config(file.config, config)
    assert file.config.rms_norm_eps == pytest.approx(config.rms_norm_eps)
    validate_tensors(file.config, file, "x.gguf")
    for tensor, array in tiny_tensors(name).items():
        read = file.read(tensor)
        assert file.file_of(tensor) == tmp_path / "x.gguf"
        assert read.dtype == np.float32
        assert read.shape == file.shape(tensor)
        np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama", "llama_mha_bias", "qwen2", "qwen3"])
def test_quantised_types(tmp_path: Path, name: str, type_name: str) -> None:
    """Decoded rows are in Hugging Face order: quantising does not mix rows, so it commutes."""
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", name, type_name))
    used = set()
    for tensor, array in tiny_tensors(name).items():
        data, kind = quantize(array, type_name)
        used.add(file.dtype(tensor))
        assert file.dtype(tensor) == kind.name
        np.testing.assert_array_equal(file.read(tensor), gguf.dequantize(data, kind))
    assert type_name in used
    assert file.config.dtype == ("bfloat16" if type_name == "BF16" else "float16")


DECODABLE = [
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
]  # fmt: skip


@pytest.mark.parametrize("type_name", DECODABLE)
def test_types_without_a_quantiser(tmp_path: Path, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Small bytes: scales made of them are finite.
    data = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", extra={"extra.weight": (data, kind)}))
    assert file.is_supported("extra.weight")
    np.testing.assert_array_equal(file.read("extra.weight"), gguf.dequantize(data, kind))


def test_undecodable_type_is_refused_when_read(tmp_path: Path) -> None:
    extra = {"extra.weight": (np.zeros(4, np.int32), gguf.GGMLQuantizationType.I32)}
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", extra=extra))
    assert not file.is_supported("extra.weight")
    with pytest.raises(CheckpointError, match=r"x\.gguf: tensor 'extra\.weight' has type I32"):
        file.read("extra.weight")


def test_metadata_is_plain_and_equals_the_library(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    metadata = GGUFFile(path).metadata
    fields = gguf.GGUFReader(path).fields
    assert metadata == {
        key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")
    }
    assert json.loads(json.dumps(metadata)) == metadata
    assert metadata["tokenizer.chat_template"] == "{{ x }}"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "\u0120b"]
    assert metadata["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("name", TINY_NAMES)
def test_names_map_both_ways(name: str) -> None:
    names = list(expected_shapes(tiny_config(name)))
    assert [hf_name(gguf_name(tensor)) for tensor in names] == names
    assert not set(names) & {gguf_name(tensor) for tensor in names}


def test_names_without_counterpart_stay() -> None:
    for name in ("blk.0.ffn_gate_inp.weight", "blk.x.attn_q.weight", "a", "", "blk.01.attn_q.bias"):
        assert hf_name(name) == gguf_name(name) == name


# Configuration


def config_of(tmp_path: Path, **changes: Any) -> Any:
    renamed = {key.replace("__", "."): value for key, value in changes.items()}
    return GGUFFile(write_gguf(tmp_path / "x.gguf", changes=renamed)).config


def test_defaults(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        llama__rope__freq_base=None,
        llama__rope__dimension_count=None,
        llama__attention__key_length=None,
        llama__attention__value_length=None,
        tokenizer__ggml__bos_token_id=None,
        tokenizer__ggml__eos_token_id=None,
    )
    assert (config.head_dim, config.rope) == (16, RopeConfig())
    assert (config.bos_token_id, config.eos_token_ids) == (None, frozenset())
    assert config.sliding_windows == (None,) * 3


def test_missing_kv_heads_mean_multi_head_attention(tmp_path: Path) -> None:
    changes = {"llama.attention.head_count_kv": None}
    path = write_gguf(tmp_path / "x.gguf", "llama_mha_bias", changes=changes)
    assert GGUFFile(path).config.num_kv_heads == 4


def test_per_layer_lists_of_equals(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        llama__attention__head_count=[4, 4, 4],
        llama__attention__head_count_kv=[2, 2, 2],
        llama__feed_forward_length=[112, 112, 112],
    )
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (4, 2, 112)


def test_ends_of_turn_are_ends_too(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=6
    )
    assert config.eos_token_ids == {2, 5, 6}


def test_llama3_rope_as_divisors(tmp_path: Path) -> None:
    divisors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    extra = {"rope_freqs.weight": (divisors, gguf.GGMLQuantizationType.F32)}
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", "llama31_rope", extra=extra))
    assert file.config.rope == RopeConfig(
        rope_theta=500000.0, freq_divisors=(1, 1, 1.5, 2, 4, 8, 8, 8)
    )
    assert "rope_freqs.weight" not in file.names


@pytest.mark.parametrize(
    "divisors", [np.ones(7), np.ones((8, 1)), np.zeros(8), np.full(8, np.nan), -np.ones(8)]
)
def test_bad_rope_divisors(tmp_path: Path, divisors: np.ndarray) -> None:
    extra = {"rope_freqs.weight": (divisors.astype(np.float32), gguf.GGMLQuantizationType.F32)}
    with pytest.raises(CheckpointError, match=r"x\.gguf: .*rope_freqs\.weight"):
        GGUFFile(write_gguf(tmp_path / "x.gguf", extra=extra))


SCALING = "llama__rope__scaling__"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"type": "none", "factor": 4.0}, RopeConfig()),
        ({"type": "linear", "factor": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        ({"factor": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
        ({"type": "linear", "factor": 0.0}, RopeConfig()),
        ({"type": "linear"}, RopeConfig()),
    ],
)
def test_rope_scaling(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    renamed = {SCALING + key: value for key, value in changes.items()}
    assert config_of(tmp_path, **renamed).rope == expected


def test_old_key_of_linear_scaling(tmp_path: Path) -> None:
    rope = config_of(tmp_path, llama__rope__scale_linear=2.0).rope
    assert rope == RopeConfig(rope_type="linear", factor=2.0)


def test_yarn(tmp_path: Path) -> None:
    yarn = {SCALING + "type": "yarn", SCALING + "factor": 4.0}
    assert config_of(tmp_path, **yarn).rope == RopeConfig(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=512
    )
    more = {
        **yarn,
        SCALING + "original_context_length": 64,
        SCALING + "yarn_beta_fast": 16.0,
        SCALING + "yarn_beta_slow": 2.0,
        SCALING + "yarn_log_multiplier": 0.5,
    }
    full = RopeConfig(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0,
        beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5,
    )  # fmt: skip
    assert config_of(tmp_path, **more).rope == full
    scaled = config_of(tmp_path, **yarn, **{SCALING + "attn_factor": 0.5}).rope
    assert scaled.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


@pytest.mark.parametrize(
    ("key", "value", "in_message"),
    [
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.block_count", 0, "llama.block_count=0"),
        ("llama.block_count", 2**32 - 1, "llama.block_count=4294967295"),
        ("llama.block_count", "3", "must be an integer"),
        ("llama.context_length", 0, "llama.context_length=0"),
        ("llama.attention.head_count", [4, 4, 2], "all layers must be alike"),
        ("llama.attention.head_count_kv", 3, "llama.attention.head_count_kv=3"),
        ("llama.attention.key_length", 15, "key_length=15"),
        ("llama.attention.value_length", 8, "value_length=8"),
        ("llama.rope.dimension_count", 8, "dimension_count=8"),
        ("llama.rope.freq_base", 0.5, "freq_base=0.5"),
        ("llama.rope.scaling.type", "longrope", "'longrope'"),
        ("llama.expert_count", 8, "llama.expert_count=8"),
        ("llama.attention.scale", 0.5, "llama.attention.scale=0.5"),
        ("llama.attention.causal", False, "llama.attention.causal=False"),
        ("llama.attention.layer_norm_rms_epsilon", None, "epsilon is missing"),
        ("tokenizer.ggml.eos_token_id", 320, "eos_token_id=320"),
        ("split.count", 3, "one of 3 split files"),
        ("general.alignment", 48, "general.alignment=48"),
    ],
)
def test_refused_configuration(tmp_path: Path, key: str, value: Any, in_message: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", changes={key: value})
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert in_message in str(caught.value)


def test_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", architecture="gemma3")
    with pytest.raises(CheckpointError, match=r"x\.gguf: .*'gemma3'.*llama, qwen2, qwen3"):
        GGUFFile(path)


def test_separate_scales_are_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.scale": (np.ones(1, np.float32), gguf.GGMLQuantizationType.F32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.scale"):
        GGUFFile(write_gguf(tmp_path / "x.gguf", extra=extra))


def test_no_embedding(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", without=("token_embd.weight",))
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is missing"):
        GGUFFile(path)


def test_missing_tensor_is_named_as_in_the_file(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "x.gguf", without=("blk.2.ffn_up.weight",)))
    with pytest.raises(CheckpointError, match=r"here: tensors are missing: blk\.2\.ffn_up\.weight"):
        validate_tensors(file.config, file, "here")


# Damaged files

U64_MAX = 2**64 - 1


def tensor_info(
    name: str = "w", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0
) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return gguf_text(name) + dimensions + struct.pack("<IQ", kind, offset)


def key(name: str, kind: int, payload: bytes) -> bytes:
    return gguf_text(name) + gguf_value(kind, payload)


def array(kind: int, length: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + payload


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "three bytes": (b"GGU", "no GGUF file"),
    "only magic": (b"GGUF", "version needs 4 bytes"),
    "a zip": (b"PK\3\4" + bytes(64), "no GGUF file"),
    "old magic": (gguf_header(magic=b"ggml"), "no GGUF file"),
    "version 1": (gguf_header(version=1), "version 1"),
    "version 4": (gguf_header(version=4), "version 4"),
    "version 0": (gguf_header(version=0), "version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (gguf_header()[:12], "count needs 8 bytes"),
    "endless keys": (gguf_header(num_keys=U64_MAX), "metadata of 18446744073709551615 keys"),
    "many keys": (gguf_header(bytes(100), num_keys=9), "metadata of 9 keys"),
    "endless tensors": (gguf_header(num_tensors=U64_MAX), "tensors needs"),
    "endless key": (gguf_header(struct.pack("<Q", U64_MAX) + bytes(50), num_keys=1), "too many"),
    "endless string": (
        gguf_header(key("k", 8, struct.pack("<Q", 2**63) + bytes(9)), num_keys=1),
        "'k' needs 9223372036854775808 bytes",
    ),
    "endless array": (
        gguf_header(key("k", 9, array(0, U64_MAX, bytes(9))), num_keys=1),
        f"at most {MAX_ARRAY_ELEMENTS}",
    ),
    "long array of strings": (
        gguf_header(key("k", 9, array(8, 1000, bytes(99))), num_keys=1),
        "'k' needs 8000 bytes",
    ),
    "long array of numbers": (
        gguf_header(key("k", 9, array(12, 1000, bytes(99))), num_keys=1),
        "'k' needs 8000 bytes",
    ),
    "array of arrays": (
        gguf_header(key("k", 9, array(9, 1, array(0, 0))), num_keys=1),
        "unsupported value type 9",
    ),
    "unknown value type": (gguf_header(key("k", 13, bytes(9)), num_keys=1), "value type 13"),
    "key not UTF-8": (gguf_header(gguf_text(b"\xff") + bytes(9), num_keys=1), "not UTF-8"),
    "value not UTF-8": (
        gguf_header(key("k", 8, gguf_text(b"\xff\xfe")), num_keys=1),
        "'k' is not UTF-8",
    ),
    "key given twice": (
        gguf_header(2 * key("k", 0, b"\1"), num_keys=2),
        "metadata key 'k' is given twice",
    ),
    "tensor given twice": (
        gguf_header(tensors=2 * tensor_info(), num_tensors=2),
        "tensor 'w' is given twice",
    ),
    "five dimensions": (
        gguf_header(tensors=tensor_info(shape=(1,) * 5), num_tensors=1),
        "'w' has 5 dimensions",
    ),
    "endless dimensions": (
        gguf_header(tensors=gguf_text("w") + b"\xff" * 4 + bytes(40), num_tensors=1),
        "4294967295 dimensions",
    ),
    "overflowing shape": (
        gguf_header(tensors=tensor_info(shape=(2**32, 2**32, 0, 2**62)), num_tensors=1),
        "is truncated",
    ),
    "huge shape": (
        gguf_header(tensors=tensor_info(shape=(2**62, 2)), num_tensors=1),
        "'w' has too many elements",
    ),
    "unknown tensor type": (
        gguf_header(tensors=tensor_info(kind=99) + bytes(64), num_tensors=1),
        "tensor 'w' has type number 99",
    ),
    "row no multiple of a block": (
        gguf_header(tensors=tensor_info(shape=(33,), kind=8) + bytes(99), num_tensors=1),
        "multiples of 32",
    ),
    "beyond the end": (
        gguf_header(tensors=tensor_info(shape=(2**30,)) + bytes(64), num_tensors=1),
        "tensor 'w' ends at byte",
    ),
    "offset beyond the end": (
        gguf_header(tensors=tensor_info(offset=2**63) + bytes(64), num_tensors=1),
        "tensor 'w' ends at byte",
    ),
    "unaligned": (
        gguf_header(tensors=tensor_info(offset=4) + bytes(64), num_tensors=1),
        "tensor 'w' is not aligned",
    ),
    "alignment 0": (
        gguf_header(key("general.alignment", 4, bytes(4)), num_keys=1),
        "general.alignment=0",
    ),
    "alignment a string": (
        gguf_header(key("general.alignment", 8, gguf_text("x")), num_keys=1),
        "general.alignment='x'",
    ),
    "no architecture": (gguf_header(), "general.architecture is missing"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path: Path, case: str) -> None:
    raw, in_message = BAD_FILES[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    assert time.perf_counter() - started < 1
    assert str(caught.value).startswith(f"{path}: ")
    assert in_message in str(caught.value)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.9, 0.999])
def test_truncated_anywhere(tmp_path: Path, share: float) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"x\.gguf: .*(truncated|ends at byte)"):
        GGUFFile(path)


def test_a_large_vocabulary_is_quick(tmp_path: Path) -> None:
    tokens = b"".join(gguf_text(f"token{i}") for i in range(300_000))
    raw = gguf_header(key("tokens", 9, array(8, 300_000, tokens)), num_keys=1)
    started = time.perf_counter()
    header = parse_header(Path("x.gguf"), np.frombuffer(raw, np.uint8))
    assert time.perf_counter() - started < 2
    tokens_read = header.metadata["tokens"]
    assert isinstance(tokens_read, list)
    assert tokens_read[-1] == "token299999"


@cache
def good_bytes(directory: Path) -> bytes:
    return write_gguf(directory / "good.gguf").read_bytes()


@given(
    st.lists(
        st.tuples(st.integers(0, 4200), st.binary(min_size=0, max_size=8), st.integers(0, 8)),
        min_size=1,
        max_size=4,
    )
)
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_mutated_files(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes, int]]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    raw = good_bytes(directory)
    for position, insert, cut in edits:
        raw = raw[:position] + insert + raw[position + cut :]
    path = directory / "mutated.gguf"
    path.write_bytes(raw)
    started = time.perf_counter()
    assert str(path) in _complaint(path)
    assert time.perf_counter() - started < 1


def _complaint(path: Path) -> str:
    """Why the file is refused; its path where it is not and all of it can be read."""
    try:
        file = GGUFFile(path)
        validate_tensors(file.config, file, str(path))
    except CheckpointError as error:
        return str(error)
    for name in file.names:
        if file.is_supported(name):
            file.read(name)
    return str(path)
