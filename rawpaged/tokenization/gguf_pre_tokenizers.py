"""How a byte-level BPE vocabulary splits text into words first, by GGUF's `pre` name."""

from __future__ import annotations

from dataclasses import dataclass

from rawpaged.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Rules of one family; the patterns are those of its published tokenizer.json."""

    patterns: tuple[str, ...]
    """Regular expressions (Oniguruma) applied in turn, each splitting what the last one left."""
    nfc: bool = False
    """Text is brought into Unicode's composed form first."""
    ignore_merges: bool = False
    """A word that is itself a token is taken whole, even if no merges lead to it."""
    add_bos: bool = False
    """Whether encoding starts with the beginning-of-sequence token if the file does not say."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_REST}"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PLAIN = PreTokenizer(patterns=(_GPT2,))
_SINGLE_DIGITS = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA_BPE = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)

_PRE_TOKENIZERS = {
    # Files older than the key, too; llama.cpp splits these by rules that no model was trained on.
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": PreTokenizer(patterns=(_QWEN2,), nfc=True),
    "qwen35": PreTokenizer(patterns=(_QWEN35,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer(patterns=(_QWEN2,)),
    "deepseek-v3": PreTokenizer(
        patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
    ),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(patterns=(_GPT4O,)),
    "llama4": PreTokenizer(patterns=(_GPT4O,)),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Raises CheckpointError for a name that is not known, listing those that are."""
    try:
        return _PRE_TOKENIZERS[name]
    except KeyError:
        raise CheckpointError(
            f"GGUF metadata tokenizer.ggml.pre: {name!r} is not supported; supported are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        ) from None
