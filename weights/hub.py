"""Fetches a checkpoint from the Hugging Face hub into that library's own cache."""

from __future__ import annotations

from pathlib import Path

from rawpaged.errors import CheckpointError

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
# Not "*.safetensors": some repositories hold the same weights twice (consolidated.safetensors).
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


def fetch_from_hub(
    repo_id: str, *, revision: str | None, with_tokenizer: bool, with_weights: bool
) -> Path:
    """The directory that holds the files. Raises CheckpointError if they cannot be had."""
    # Imported here: it takes half a second, which local checkpoints need not pay.
    from huggingface_hub import snapshot_download

    patterns = list(CONFIG_FILES)
    patterns += TOKENIZER_FILES if with_tokenizer else ()
    patterns += WEIGHT_FILES if with_weights else ()
    try:
        directory = snapshot_download(repo_id, revision=revision, allow_patterns=patterns)
    except Exception as error:
        # The client lets through what its HTTP, cache and progress libraries raise, and those
        # have no base class in common; whatever it is, the checkpoint is not there.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{repo_id!r} could not be fetched from the Hugging Face hub: {reason[:400]}\n"
            "Without access to the hub, give a local directory or GGUF file; for a private or "
            "gated repository, set HF_TOKEN."
        ) from error
    return Path(directory)
