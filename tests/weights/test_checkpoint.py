"""From a name to a checkpoint: what is opened, what is fetched, and what is refused in time."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants as hub_constants
from safetensors.numpy import save_file

from rawpaged.errors import CheckpointError
from rawpaged.weights import checkpoint as checkpoint_module
from rawpaged.weights.checkpoint import open_checkpoint, read_model_config
from tests.weights.builders import TINY, TINY_NAMES, tiny_config, tiny_tensors, write_gguf


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A writable copy of the golden checkpoint."""
    directory = tmp_path / "llama"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(TINY / "llama" / name, directory)
    return directory


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Path:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(checkpoint_module, "fetch_from_hub", refuse)


def refusal(model: object, **options: Any) -> str:
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model), **options)
    assert time.perf_counter() - started < 1
    return str(caught.value)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_directories(name: str, no_hub: None) -> None:
    opened = open_checkpoint(str(TINY / name))
    assert opened.path == TINY / name
    assert opened.model_config == tiny_config(name) == read_model_config(str(TINY / name))
    assert opened.tensors is not None
    assert set(opened.tensors.names) == set(tiny_tensors(name))
    assert opened.tokenizer_directory is None
    assert opened.gguf_metadata is None


def test_tokenizer_directory(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    assert open_checkpoint(str(llama)).tokenizer_directory == llama


def test_gguf_files(tmp_path: Path, no_hub: None) -> None:
    for path in (tmp_path / "x.gguf", tmp_path / "without-suffix"):
        write_gguf(path)
        opened = open_checkpoint(str(path))
        assert opened.path == path
        assert opened.gguf_metadata is not None
        assert opened.gguf_metadata["general.architecture"] == "llama"
        assert opened.model_config == read_model_config(str(path))
        assert opened.tensors is not None


def test_dummy_needs_only_a_configuration(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "generation_config.json").unlink()
    for model in (llama, llama / "config.json"):
        opened = open_checkpoint(str(model), load_format="dummy")
        assert opened.tensors is None
        assert opened.model_config == read_model_config(str(model))
    assert "model.safetensors" in refusal(llama)


def test_relative_paths_and_home(
    llama: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    monkeypatch.chdir(llama.parent)
    assert open_checkpoint("llama").path == Path("llama")
    monkeypatch.setenv("HOME", str(llama.parent))
    assert open_checkpoint("~/llama").path == llama


# Damaged directories


def test_missing_tensor(llama: Path) -> None:
    tensors = tiny_tensors("llama")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, llama / "model.safetensors")
    assert refusal(llama) == f"{llama}: tensors are missing: model.layers.1.mlp.down_proj.weight"


def test_wrong_shape(llama: Path) -> None:
    tensors = tiny_tensors("llama")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, llama / "model.safetensors")
    message = refusal(llama)
    assert f"{llama / 'model.safetensors'}: tensor 'model.norm.weight' has shape [63]" in message


def test_shape_that_the_configuration_contradicts(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "vocab_size": 321}))
    assert "'model.embed_tokens.weight' has shape [320, 64]" in refusal(llama)


def test_many_layers_that_are_not_there(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4096}))
    assert "more" in refusal(llama)


@pytest.mark.parametrize(
    ("text", "in_message"),
    [
        ("", "not valid JSON"),
        ("[]", "no JSON object"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("{" * 100_000, "not valid JSON"),
        ('{"a":' * 100_000, "not valid JSON: it is nested too deeply"),
        ('{"a": ' + "9" * 100_000 + "}", "not valid JSON: it holds an integer of too many digits"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 4000 + "}", "hidden_size=99999"),
        ('{"model_type": "llama", "hidden_size": 1e999}', "hidden_size=inf must be an integer"),
        ('{"architectures": ["BertModel"]}', "'BertModel' is not supported"),
        ('{"model_type": "llama"}', "hidden_size is missing"),
    ],
)
def test_bad_configuration(llama: Path, text: str, in_message: str) -> None:
    (llama / "config.json").write_text(text)
    message = refusal(llama)
    assert message.startswith(f"{llama / 'config.json'}: ")
    assert in_message in message
    assert len(message) < 300
    for word in ("recursion", "sys.", "int_max_str"):
        assert word not in message


def test_bad_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").write_text("{")
    assert refusal(llama).startswith(f"{llama / 'generation_config.json'}: ")


def test_directories_without_configuration(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: holds no config.json"
    write_gguf(tmp_path / "x.gguf")
    assert "x.gguf: give the GGUF file's path" in refusal(tmp_path)


def test_only_a_pickle(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "pytorch_model.bin: pickled weights can run code" in refusal(llama)


def test_files_that_are_no_checkpoint(llama: Path, tmp_path: Path) -> None:
    assert "given by its directory" in refusal(llama / "model.safetensors")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert refusal(tmp_path / "x.gguf") == f"{tmp_path / 'x.gguf'}: is empty"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "link: cannot be read" in refusal(tmp_path / "link")


def test_denied_access_is_a_checkpoint_error(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*args: object, **kwargs: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert "config.json: cannot be read" in refusal(llama)


# Names that are no local files


@pytest.mark.parametrize(
    "model", ["./a", "../a/b", "/a/b", "~/nothing/here", "a.gguf", "a/b.gguf", "a/b/c", "a.json"]
)
def test_paths_are_never_looked_up_on_the_hub(model: str, no_hub: None) -> None:
    assert refusal(model) == f"{model}: there is no such file or directory"


def test_null_character(no_hub: None) -> None:
    assert "null character" in refusal("a\0b")


@pytest.mark.parametrize("model", ["nothing-of-that-name", "nobody/nothing", "not a name", "a--b"])
def test_offline_hub(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What HF_HUB_OFFLINE=1 sets when the package is imported.
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    assert callable(huggingface_hub.snapshot_download)  # imported before the clock starts
    message = refusal(model)
    assert f"model {model!r} is no local directory or GGUF file" in message
    assert "built-in model (smollm2-135m)" in message
    assert "Hugging Face hub" in message
    assert "give a local directory or GGUF file" in message


def test_what_is_asked_of_the_hub(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    opened = open_checkpoint("owner/name", revision="v1")
    assert opened.path == llama
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "v1")
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(asked["allow_patterns"])
    assert not any("bin" in pattern or "gguf" in pattern for pattern in asked["allow_patterns"])
    open_checkpoint("owner/name", load_format="dummy")
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])
    read_model_config("owner/name")
    assert asked["allow_patterns"] == ["config.json", "generation_config.json"]


def test_hub_errors_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise RuntimeError("connection\n   reset")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "connection reset" in refusal("owner/name")


def test_builtin_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    monkeypatch.setattr(checkpoint_module, "fetch_builtin", lambda model, progress: path)
    opened = open_checkpoint("smollm2-135m")
    assert opened.path == path
    assert read_model_config("smollm2-135m") == opened.model_config
