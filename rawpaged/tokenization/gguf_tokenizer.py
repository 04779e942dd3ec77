"""Build a Tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from rawpaged.errors import CheckpointError
from rawpaged.tokenization.chat_template import read_chat_template
from rawpaged.tokenization.gguf_pre_tokenizers import find_pre_tokenizer
from rawpaged.tokenization.gguf_vocabulary import GgufVocabulary, TokenType, read_gguf_vocabulary
from rawpaged.tokenization.tokenizer import SpecialTokens, Tokenizer

_SPACE = "\u2581"
"""SentencePiece's visible space."""


def load_tokenizer_from_gguf(
    metadata: Mapping[str, object], *, chat_template: str | None = None
) -> Tokenizer:
    """Tokenizer of a GGUF file, `metadata` being its keys and values.

    `chat_template` (Jinja text or a file name) takes the place of the file's own. Raises
    CheckpointError, naming the key, for metadata that is damaged or of an unknown kind.

    SentencePiece vocabularies become byte-pair merges in order of score, which gives what
    SentencePiece does as long as scores are distinct; it breaks ties from left to right. Whether
    special tokens swallow spaces beside them is not in a GGUF file; here they never do.
    """
    vocabulary = read_gguf_vocabulary(metadata)
    is_sentencepiece = vocabulary.scores is not None
    add_bos = vocabulary.add_bos_token
    if add_bos is None:
        add_bos = is_sentencepiece or find_pre_tokenizer(vocabulary.pre).add_bos
    try:
        backend = _sentencepiece(vocabulary) if is_sentencepiece else _byte_level_bpe(vocabulary)
        _add_tokens(backend, vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"GGUF tokenizer: {error}") from error
    prefix = [vocabulary.bos_token_id] if add_bos else []
    suffix = [vocabulary.eos_token_id] if vocabulary.add_eos_token else []
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(vocabulary),
        chat_templates=_chat_templates(metadata, chat_template),
        affixes=(
            [token_id for token_id in prefix if token_id is not None],
            [token_id for token_id in suffix if token_id is not None],
        ),
    )


def _token_ids(vocabulary: GgufVocabulary) -> dict[str, int]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return {
        token: token_id
        for token_id, (token, kind) in enumerate(pairs)
        if token and kind is not TokenType.UNUSED
    }


def _byte_level_bpe(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    assert vocabulary.merges is not None
    rules = find_pre_tokenizer(vocabulary.pre)
    token_ids = _token_ids(vocabulary)
    for index, (left, right) in enumerate(vocabulary.merges):
        if left + right in token_ids and left in token_ids and right in token_ids:
            continue
        missing = next(each for each in (left, right, left + right) if each not in token_ids)
        raise CheckpointError(
            f"GGUF metadata tokenizer.ggml.merges[{index}]: {missing!r:.80} is not among the tokens"
        )
    model = models.BPE(vocab=token_ids, merges=vocabulary.merges, ignore_merges=rules.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    token_ids = _token_ids(vocabulary)
    unknown = vocabulary.unk_token_id
    if unknown is not None and not vocabulary.has_text(unknown):
        unknown = None
    model = models.BPE(
        vocab=token_ids,
        merges=_merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in token_ids for byte in range(256)),
    )
    backend = tokenizers.Tokenizer(model)
    add_space = vocabulary.add_space_prefix is not False
    # Special tokens cut a text into parts; each part gets the space, as in llama.cpp.
    prefix = [normalizers.Prepend(_SPACE)] if add_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if add_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """All ways to join two ordinary tokens into a third, the best-scored result first."""
    assert vocabulary.scores is not None
    scores = {
        token: score
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
        if token and kind is TokenType.NORMAL
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Have special and user-defined tokens matched as a whole, before anything else."""
    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if not token:
            continue
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind is TokenType.USER_DEFINED:
            plain.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _special_tokens(vocabulary: GgufVocabulary) -> SpecialTokens:
    def text(token_id: int | None) -> str | None:
        return None if token_id is None else vocabulary.tokens[token_id]

    return SpecialTokens(
        bos_token=text(vocabulary.bos_token_id),
        eos_token=text(vocabulary.eos_token_id),
        pad_token=text(vocabulary.pad_token_id),
        unk_token=text(vocabulary.unk_token_id),
    )


def _chat_templates(metadata: Mapping[str, object], chat_template: str | None) -> dict[str, str]:
    if chat_template is not None:
        return {"default": read_chat_template(chat_template)}
    templates = {}
    for key, value in metadata.items():
        base, _, name = key.partition("chat_template")
        if base != "tokenizer." or (name and not name.startswith(".")):
            continue
        if not isinstance(value, str):
            raise CheckpointError(f"GGUF metadata {key}: must be a string")
        templates[name[1:] or "default"] = value
    return templates
