"""From the name a user gave to a checkpoint that is known to be complete and well formed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rawpaged.errors import CheckpointError, ConfigError
from rawpaged.models.config import ModelConfig
from rawpaged.models.hf_config import parse_hf_config
from rawpaged.weights.builtin import BUILTIN_MODELS, fetch_builtin
from rawpaged.weights.files import file_size, os_errors_as_checkpoint_errors, read_json
from rawpaged.weights.gguf import GGUFFile
from rawpaged.weights.gguf_header import MAGIC
from rawpaged.weights.hub import TOKENIZER_FILES, fetch_from_hub
from rawpaged.weights.names import validate_tensors
from rawpaged.weights.safetensors import open_safetensors
from rawpaged.weights.tensors import TensorSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files, checked: every tensor the model needs is there in its shape."""

    path: Path
    """The directory, or the GGUF file."""
    model_config: ModelConfig
    tensors: TensorSource | None
    """None if opened with load_format="dummy"."""
    tokenizer_directory: Path | None
    """The directory if any tokenizer file is in it."""
    gguf_metadata: dict[str, object] | None
    """Of a GGUF file: keys as in the file, values str, int, float, bool or lists of them. The
    tokenizer and the chat template are in it (`tokenizer.ggml.*`, `tokenizer.chat_template`)."""


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    progress: bool = True,
) -> Checkpoint:
    """The checkpoint that `model` names, fetched if it has to be.

    `model` is a directory, a GGUF file, the built-in name or a hub id; what exists locally wins,
    and what looks like a path is never looked up on the hub. With load_format="dummy" a directory
    with only a config.json will do. Raises CheckpointError before any tensor is read.
    """
    with_weights = load_format != "dummy"
    path = _locate(
        model, revision, with_tokenizer=True, with_weights=with_weights, progress=progress
    )
    with os_errors_as_checkpoint_errors(str(path)):
        if path.is_dir():
            return _open_directory(path, with_weights)
        if path.name == "config.json":
            return _open_directory(path.parent, with_weights)
        return _open_gguf(path, with_weights)


def read_model_config(model: str, *, revision: str | None = None) -> ModelConfig:
    """Only the configuration: `model` may also be a config.json, or a directory with just that."""
    return read_outline(model, revision=revision)[0]


def read_outline(
    model: str, *, revision: str | None = None
) -> tuple[ModelConfig, TensorSource | None]:
    """What a memory plan is made of: the configuration, and a GGUF file's tensors, not checked.

    `model` may also be a config.json, or a directory with just that.
    """
    path = _locate(model, revision, with_tokenizer=False, with_weights=False, progress=True)
    with os_errors_as_checkpoint_errors(str(path)):
        if path.is_dir():
            return _read_config(path), None
        if path.name == "config.json":
            return _read_config(path.parent), None
        file = GGUFFile(path)
        return file.config, file


def _locate(
    model: str, revision: str | None, *, with_tokenizer: bool, with_weights: bool, progress: bool
) -> Path:
    """A directory, a config.json or a GGUF file that exists."""
    if "\0" in model:
        raise CheckpointError(f"model {model!r} holds a null character")
    path = Path(model).expanduser() if model.startswith("~") else Path(model)
    if revision is not None and (os.path.lexists(path) or model in BUILTIN_MODELS):
        raise ConfigError(f"revision={revision!r} is for hub ids, which {model!r} is not")
    if os.path.lexists(path):
        with os_errors_as_checkpoint_errors(model):
            return path if path.is_dir() else _model_file(path)
    if model in BUILTIN_MODELS:
        return fetch_builtin(BUILTIN_MODELS[model], progress=progress)
    if _looks_like_path(model):
        raise CheckpointError(f"{model}: there is no such file or directory")
    try:
        return fetch_from_hub(
            model, revision=revision, with_tokenizer=with_tokenizer, with_weights=with_weights
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"model {model!r} is no local directory or GGUF file and not a built-in model "
            f"({', '.join(BUILTIN_MODELS)}); as a hub id: {error}"
        ) from error.__cause__


def _model_file(path: Path) -> Path:
    if file_size(path) and path.name == "config.json":
        return path
    with path.open("rb") as file:
        is_gguf = file.read(4) == MAGIC
    if is_gguf or path.suffix == ".gguf":
        return path
    raise CheckpointError(
        f"{path}: is no GGUF file; a safetensors checkpoint is given by its directory"
    )


def _looks_like_path(model: str) -> bool:
    # A hub id has at most one slash, between owner and name.
    return (
        model.startswith((".", "/", "~"))
        or model.endswith((".gguf", ".json", ".safetensors", "/"))
        or model.count("/") > 1
    )


def _open_gguf(path: Path, with_weights: bool) -> Checkpoint:
    file = GGUFFile(path)
    validate_tensors(file.config, file, str(path))
    return Checkpoint(
        path=path,
        model_config=file.config,
        tensors=file if with_weights else None,
        tokenizer_directory=None,
        gguf_metadata=file.metadata,
    )


def _open_directory(directory: Path, with_weights: bool) -> Checkpoint:
    config = _read_config(directory)
    tensors = None
    if with_weights:
        tensors = open_safetensors(directory)
        validate_tensors(config, tensors, str(directory))
    has_tokenizer = any((directory / name).exists() for name in TOKENIZER_FILES)
    return Checkpoint(
        path=directory,
        model_config=config,
        tensors=tensors,
        tokenizer_directory=directory if has_tokenizer else None,
        gguf_metadata=None,
    )


def _read_config(directory: Path) -> ModelConfig:
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{directory}: {_why_no_config(directory)}")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else None
    try:
        return parse_hf_config(read_json(path), generation)
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None


def _why_no_config(directory: Path) -> str:
    gguf_names = sorted(path.name for path in directory.glob("*.gguf"))
    if gguf_names:
        return f"holds no config.json but {', '.join(gguf_names[:4])}: give the GGUF file's path"
    return "holds no config.json"
