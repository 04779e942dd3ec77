"""The safetensors reader: equal to the library on good files, refuses all bad ones at once."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rawpaged.errors import CheckpointError
from rawpaged.weights.safetensors import (
    INDEX_NAME,
    SafetensorsFile,
    open_safetensors,
    parse_header,
)
from tests.weights.builders import TINY, TINY_NAMES, entry, safetensors_bytes, tiny_tensors

GOOD = {"w": entry("F32", [2, 3], 0, 24)}


@pytest.mark.parametrize("name", TINY_NAMES)
def test_equals_the_library(name: str) -> None:
    source = open_safetensors(TINY / name)
    expected = tiny_tensors(name)
    assert set(source.names) == set(expected)
    for tensor, array in expected.items():
        read = source.read(tensor)
        assert read.dtype == array.dtype
        assert source.shape(tensor) == array.shape
        assert source.nbytes(tensor) == array.nbytes
        np.testing.assert_array_equal(read, array)


def test_every_weight_type_and_odd_alignment(tmp_path: Path) -> None:
    values = np.arange(-6, 6).reshape(3, 4)
    # An array of three bytes first: what follows is not aligned.
    arrays: dict[str, npt.NDArray[Any]] = {
        "a": np.zeros(3, np.uint8),
        "f32": values.astype(np.float32),
        "f16": values.astype(np.float16),
        "bf16": values.astype(ml_dtypes.bfloat16),
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "np"})
    for path in (tmp_path / "x.safetensors", _shifted(tmp_path / "x.safetensors")):
        file = SafetensorsFile(path)
        for name in ("f32", "f16", "bf16", "scalar", "empty"):
            read = file.read(name)
            assert read.dtype == arrays[name].dtype
            assert read.flags.aligned
            np.testing.assert_array_equal(read, arrays[name])


def _shifted(path: Path) -> Path:
    """The same file with one space more in the header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shifted = path.with_name("shifted.safetensors")
    shifted.write_bytes(safetensors_bytes(raw[8 : 8 + length] + b" ", raw[8 + length :]))
    return shifted


def test_reads_are_views_of_the_file() -> None:
    array = open_safetensors(TINY / "llama").read("model.embed_tokens.weight")
    assert not array.flags.owndata
    assert not array.flags.writeable


@pytest.mark.parametrize("dtype", ["I64", "F64", "F8_E4M3", "BOOL"])
def test_other_types_are_refused_when_read(tmp_path: Path, dtype: str) -> None:
    size = {"I64": 8, "F64": 8}.get(dtype, 1)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"w": entry(dtype, [2], 0, 2 * size)}, bytes(2 * size)))
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError, match=f"x.safetensors: tensor 'w' has type {dtype}"):
        file.read("w")


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (b"\0" * 7, "too short"),
    "header beyond the end": (safetensors_bytes(GOOD, length=1000), "truncated"),
    "huge header length": (safetensors_bytes(GOOD, length=2**64 - 1), "truncated"),
    "header length over the cap": (safetensors_bytes(GOOD, length=100_000_001), "truncated"),
    "header length 0": (safetensors_bytes(GOOD, bytes(24), length=0), "no JSON object"),
    "a pickle": (b"\x80\x04\x95" + bytes(64), "truncated"),
    "a list": (safetensors_bytes([1]), "no JSON object"),
    "leading space": (safetensors_bytes(b' {"__metadata__":{}}'), "no JSON object"),
    "bad JSON": (safetensors_bytes(b'{"w":'), "not valid JSON"),
    "more than one value": (safetensors_bytes(b"{}{}"), "not valid JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff":1}'), "not valid JSON"),
    "deep nesting": (safetensors_bytes(b'{"w":' + b"[" * 100_000), "JSON: it is nested too deeply"),
    "huge integer": (safetensors_bytes(b'{"w":' + b"9" * 100_000 + b"}"), "of too many digits"),
    "key given twice": (safetensors_bytes(b'{"w":{},"w":{}}'), "'w' is given twice"),
    "metadata not strings": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry no object": (safetensors_bytes({"w": 3}), "'w'"),
    "entry without dtype": (safetensors_bytes({"w": {"shape": [], "data_offsets": [0, 0]}}), "'w'"),
    "entry with more": (safetensors_bytes({"w": {**GOOD["w"], "x": 1}}, bytes(24)), "'w'"),
    "unknown dtype": (safetensors_bytes({"w": entry("F33", [6], 0, 24)}, bytes(24)), "'F33'"),
    "dtype no string": (
        safetensors_bytes({"w": {**GOOD["w"], "dtype": ["F32"]}}, bytes(24)),
        "'w': unknown dtype",
    ),
    "shape no list": (safetensors_bytes({"w": {**GOOD["w"], "shape": 6}}, bytes(24)), "'w'"),
    "negative dimension": (safetensors_bytes({"w": entry("F32", [-1, -6], 0, 24)}), "shape"),
    "float dimension": (safetensors_bytes({"w": entry("F32", [6.0], 0, 24)}), "shape"),
    "bool dimension": (safetensors_bytes({"w": entry("F32", [True, 6], 0, 24)}), "shape"),
    "overflowing shape": (safetensors_bytes({"w": entry("F32", [2**62, 2**62], 0, 24)}), "needs"),
    "shape wrapping to 24": (
        safetensors_bytes({"w": entry("F32", [2**61, 8, 0], 0, 24)}, bytes(24)),
        "needs 0 bytes",
    ),
    "dimension beyond 64 bits": (safetensors_bytes({"w": entry("F32", [2**70], 0, 24)}), "shape"),
    "too many dimensions": (safetensors_bytes({"w": entry("F32", [1] * 65, 0, 4)}), "shape"),
    "three offsets": (
        safetensors_bytes({"w": {**GOOD["w"], "data_offsets": [0, 24, 24]}}, bytes(24)),
        "data_offsets",
    ),
    "offsets reversed": (safetensors_bytes({"w": entry("F32", [6], 24, 0)}), "data_offsets"),
    "negative offset": (safetensors_bytes({"w": entry("F32", [6], -24, 0)}), "data_offsets"),
    "span too short": (safetensors_bytes({"w": entry("F32", [2, 3], 0, 20)}, bytes(20)), "needs"),
    "beyond the end": (safetensors_bytes(GOOD, bytes(23)), "'w': ends at byte"),
    "far beyond the end": (
        safetensors_bytes({"w": entry("U8", [2**40], 0, 2**40)}, bytes(24)),
        "truncated",
    ),
    "trailing bytes": (safetensors_bytes(GOOD, bytes(25)), "1 bytes at the end"),
    "starts late": (safetensors_bytes({"w": entry("F32", [6], 4, 28)}, bytes(28)), "a gap"),
    "a hole": (
        safetensors_bytes(
            {"w": entry("F32", [1], 0, 4), "x": entry("F32", [1], 8, 12)}, bytes(12)
        ),
        "'x': follows a gap",
    ),
    "overlap": (
        safetensors_bytes({"w": entry("F32", [2], 0, 8), "x": entry("F32", [2], 4, 12)}, bytes(12)),
        "'x': overlaps",
    ),
    "the same bytes twice": (
        safetensors_bytes({"w": entry("F32", [2], 0, 8), "x": entry("F32", [2], 0, 8)}, bytes(8)),
        "'x': overlaps",
    ),
    "half an element": (safetensors_bytes({"w": entry("F4", [3], 0, 1)}, b"\0"), "needs 2 bytes"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path: Path, case: str) -> None:
    raw, in_message = BAD_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(tmp_path)
    assert str(path) in str(caught.value)
    assert in_message in str(caught.value)
    assert len(str(caught.value)) < 500


def num_lines(path: Path, num_tensors: int) -> int:
    """Lines of Python that run while a file of so many tensors is opened."""
    header = {f"tensor.{i}": entry("F32", [1], 4 * i, 4 * i + 4) for i in range(num_tensors)}
    path.write_bytes(safetensors_bytes(header, bytes(4 * num_tensors)))
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        file = SafetensorsFile(path)
    finally:
        sys.settrace(before)
    assert len(file.entries) == num_tensors
    return count


def test_work_grows_with_the_number_of_tensors_alone(tmp_path: Path) -> None:
    few, many = (num_lines(tmp_path / f"{n}.safetensors", n) for n in (100, 1000))
    assert few < many < 11 * few


mutations = st.lists(
    st.tuples(st.integers(0, 400), st.binary(min_size=0, max_size=8), st.integers(0, 8)),
    min_size=1,
    max_size=4,
)


@given(mutations)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_headers(edits: list[tuple[int, bytes, int]]) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", [2, 2], 0, 8)}
    header |= {"w": entry("F32", [2, 3], 8, 32), "e": entry("F32", [0], 32, 32)}
    raw = safetensors_bytes(header, bytes(32))
    for position, insert, cut in edits:
        raw = raw[:position] + insert + raw[position + cut :]
    _check_any_bytes(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3), st.binary())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invented_headers(header: dict[str, Any], data: bytes) -> None:
    _check_any_bytes(safetensors_bytes(header, data))


def _check_any_bytes(raw: bytes) -> None:
    """Refused with the file named; or accepted, with every tensor inside the file."""
    complaint, entries = "x.safetensors: ", {}
    try:
        entries = parse_header(Path("x.safetensors"), np.frombuffer(raw, np.uint8))
    except CheckpointError as error:
        complaint = str(error)
    assert complaint.startswith("x.safetensors: ")
    assert all(0 <= item.start <= item.end <= len(raw) for item in entries.values())


@pytest.mark.parametrize("case", BAD_FILES)
def test_the_library_refuses_them_too(tmp_path: Path, case: str) -> None:
    """So no good file is refused here: but for four oddities that no writer produces."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD_FILES[case][0])
    stricter = {"key given twice", "entry with more", "too many dimensions", "leading space"}
    try:
        with safe_open(path, framework="numpy"):
            assert case in stricter
    except (SafetensorError, OSError):
        pass


# Shards


def shard(directory: Path, name: str = "llama") -> dict[str, str]:
    """A golden checkpoint in two shards with their index; the map from tensor to file."""
    directory.mkdir(exist_ok=True)
    tensors = tiny_tensors(name)
    weight_map: dict[str, str] = {}
    for part, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({tensor: tensors[tensor] for tensor in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(directory, weight_map)
    shutil.copy(TINY / name / "config.json", directory)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def test_shards_equal_one_file(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    source = open_safetensors(tmp_path)
    for name, array in tiny_tensors("llama").items():
        assert source.file_of(name) == tmp_path / weight_map[name]
        np.testing.assert_array_equal(source.read(name), array)


@pytest.mark.parametrize(
    "file",
    [
        "../../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "x.bin",
        "nul\0.safetensors",
        "",
        3,
        None,
    ],
)
def test_index_may_name_only_its_own_directory(tmp_path: Path, file: object) -> None:
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    for outside in (tmp_path, directory):
        shutil.copy(TINY / "llama" / "model.safetensors", outside / "x.safetensors")
    write_index(directory, {"model.norm.weight": file})
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'model\.norm\.weight'"):
        open_safetensors(directory)


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: is missing"):
        open_safetensors(tmp_path)


def test_index_names_a_missing_tensor(tmp_path: Path) -> None:
    weight_map = shard(tmp_path)
    write_index(tmp_path, {**weight_map, "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00001.*: has no tensor 'ghost'"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}"])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        open_safetensors(tmp_path)


def test_truncated_shard(tmp_path: Path) -> None:
    shard(tmp_path)
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00001.*: tensor '.*': ends at byte"):
        open_safetensors(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickled weights can run code"):
        open_safetensors(tmp_path)


def test_other_weight_files_are_mentioned(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        open_safetensors(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it holds consolidated\.safetensors"):
        open_safetensors(tmp_path)


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_safetensors(tmp_path)
