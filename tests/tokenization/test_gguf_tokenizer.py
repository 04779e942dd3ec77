from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from rawpaged.errors import CheckpointError, ConfigError
from rawpaged.tokenization.gguf_tokenizer import load_tokenizer_from_gguf
from rawpaged.tokenization.tokenizer import Tokenizer

BASE = "tokenizer.ggml."
SPACE = "\u2581"


def reference_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE as it is defined: join the best-scored neighbours until none join."""
    tokens = metadata[BASE + "tokens"]
    scores = {
        token: score
        for token, score, kind in zip(
            tokens, metadata[BASE + "scores"], metadata[BASE + "token_type"], strict=True
        )
        if kind == 1
    }
    parts = list((SPACE + text.replace(" ", SPACE)) if text else "")
    while True:
        joins = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not joins:
            break
        _, index = min(joins)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    ids: list[int] = []
    for part in parts:
        names = [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids.extend(tokens.index(name) for name in names)
    return ids


WORDS = st.sampled_from(
    ["the", "then", "other", "mother", " ", "  ", "dog", "block", "q", "é", "😀"]
)


@given(
    text=st.one_of(
        st.lists(WORDS, max_size=12).map("".join),
        st.text("the dogbrm.,-' \n\u2581", max_size=40),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    )
)
def test_sentencepiece_equals_its_definition(
    spm: Tokenizer, spm_table: dict[str, Any], text: str
) -> None:
    ids = spm.encode(text)
    assert ids == [1, *reference_sentencepiece(text, spm_table)]
    # A visible space in the text is taken for a space, as SentencePiece does.
    assert spm.decode(ids) == text.replace(SPACE, " ")


def test_sentencepiece_random_vocabularies() -> None:
    source = random.Random(7)
    for _ in range(30):
        pieces = {*"abc", SPACE}
        while len(pieces) < 24:  # every piece is two others, as BPE training makes them
            pieces.add(source.choice(sorted(pieces)) + source.choice("abc" + SPACE))
        ordered = sorted(pieces, key=len)
        metadata = {
            BASE + "model": "llama",
            BASE + "tokens": ["<unk>", "<s>", "</s>", *ordered],
            BASE + "scores": [0.0] * 3 + [-float(rank) for rank in range(len(ordered))],
            BASE + "token_type": [2, 3, 3] + [1] * len(ordered),
            BASE + "add_bos_token": False,
        }
        tokenizer = load_tokenizer_from_gguf(metadata)
        for _ in range(30):
            text = "".join(source.choices("abc ", k=source.randrange(30)))
            assert tokenizer.encode(text) == reference_sentencepiece(text, metadata)


def test_sentencepiece_flags(spm_metadata: dict[str, Any]) -> None:
    the = spm_metadata[BASE + "tokens"].index(SPACE + "the")
    spm_metadata[BASE + "add_space_prefix"] = False
    spm_metadata[BASE + "add_bos_token"] = False
    spm_metadata[BASE + "add_eos_token"] = True
    tokenizer = load_tokenizer_from_gguf(spm_metadata)
    assert tokenizer.encode(" the") == [the, 2]
    assert tokenizer.encode(" the", add_special_tokens=False) == [the]
    assert tokenizer.decode([the]) == " the"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_sentencepiece_special_tokens_in_text(spm: Tokenizer, spm_table: dict[str, Any]) -> None:
    the = spm_table[BASE + "tokens"].index(SPACE + "the")
    assert spm.encode("</s>the</s>") == [1, 2, the, 2]
    assert spm.decode([1, the, 2, the]) == "the the"
    assert spm.decode([1, the, 2], skip_special_tokens=False) == "<s> the</s>"


def test_byte_tokens_are_not_made_from_text_nor_unknown_letters_kept_apart() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "<", "0", "x", "4", "1", ">", "41>", "<0x"]
    tokens += ["<0", "41"]
    metadata = {
        BASE + "model": "llama",
        BASE + "tokens": tokens,
        BASE + "scores": [0.0] * 4 + [-float(rank) for rank in range(len(tokens) - 4)],
        BASE + "token_type": [2, 3, 3, 6] + [1] * (len(tokens) - 4),
        BASE + "add_bos_token": False,
        BASE + "add_space_prefix": False,
    }
    tokenizer = load_tokenizer_from_gguf(metadata)
    assert tokenizer.encode("<0x41>") == [tokens.index("<0x"), tokens.index("41>")]
    assert tokenizer.encode("0??1") == [tokens.index("0"), 0, tokens.index("1")]


def test_byte_level_equals_the_tokenizer_it_was_made_from(
    gpt2_metadata: dict[str, Any], byte_level_backend: tokenizers.Tokenizer
) -> None:
    tokenizer = load_tokenizer_from_gguf(gpt2_metadata)
    for text in ("The quick brown fox", "日本語 123 déjà\n\n  vu<|im_end|>x", "", "\0 \r\n"):
        ids = byte_level_backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_user_defined_and_unused_tokens(gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = load_tokenizer_from_gguf(gpt2_metadata)
    user_defined = len(gpt2_metadata[BASE + "tokens"]) - 2
    assert tokenizer.encode("a<tool call>b")[1] == user_defined
    assert tokenizer.decode([user_defined]) == "<tool call>"
    assert user_defined + 1 not in tokenizer.encode("[PAD]")
    assert tokenizer.decode([user_defined + 1]) == ""
    assert tokenizer.vocab_size == user_defined + 1


def test_arrays_may_be_numpy(gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata[BASE + "token_type"] = np.array(gpt2_metadata[BASE + "token_type"], np.int32)
    gpt2_metadata[BASE + "bos_token_id"] = np.uint32(1)
    assert load_tokenizer_from_gguf(gpt2_metadata).bos_token_id == 1


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_llama_bpe_begins_with_bos_unless_told_otherwise(
    gpt2_metadata: dict[str, Any], add_bos: bool | None
) -> None:
    gpt2_metadata[BASE + "pre"] = "llama-bpe"
    if add_bos is not None:
        gpt2_metadata[BASE + "add_bos_token"] = add_bos
    ids = load_tokenizer_from_gguf(gpt2_metadata).encode("the")
    assert (ids[0] == 1) is (add_bos is not False)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 1234 a  b\n\nc", ["It", "'s", " 1234", " a", " ", " b", "\n", "\n", "c"]),
        ("smollm", "It's 123 a", ["It", "'s", " ", "1", "2", "3", " a"]),
        ("llama-bpe", "IT'S 1234!\n\n x", ["IT", "'S", " ", "123", "4", "!\n\n", " x"]),
        ("qwen2", "IT'S 1234", ["IT", "'S", " ", "1", "2", "3", "4"]),
        ("tekken", "HTTPServer's 12", ["HTTPServer", "'s", " ", "1", "2"]),
        ("gpt-4o", "HTTPServer's 1234", ["HTTPServer's", " ", "123", "4"]),
        ("deepseek-v3", "a日本1234 .b", ["a", "日本", "123", "4", " .", "b"]),
    ],
)
def test_words_are_split_as_the_family_does(
    gpt2_metadata: dict[str, Any], pre: str, text: str, words: list[str]
) -> None:
    gpt2_metadata[BASE + "pre"] = pre
    splitter = load_tokenizer_from_gguf(gpt2_metadata)._backend.pre_tokenizer
    spans = [span for _, span in splitter.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == words


def test_qwen_composes_characters(gpt2_metadata: dict[str, Any]) -> None:
    composed, decomposed = "d\u00e9j\u00e0", "de\u0301ja\u0300"
    plain = load_tokenizer_from_gguf(gpt2_metadata)
    assert plain.encode(composed) != plain.encode(decomposed)
    gpt2_metadata[BASE + "pre"] = "qwen2"
    qwen = load_tokenizer_from_gguf(gpt2_metadata)
    assert qwen.encode(composed) == qwen.encode(decomposed)


def test_single_digit_split_equals_the_published_form(gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata[BASE + "pre"] = "smollm"
    ours = load_tokenizer_from_gguf(gpt2_metadata)._backend.pre_tokenizer
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    source = random.Random(3)
    for _ in range(200):
        text = "".join(source.choices("a1 é'st\n\t٣½.日", k=30))
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_ignore_merges_takes_a_whole_word(gpt2_metadata: dict[str, Any]) -> None:
    gpt2_metadata[BASE + "pre"] = "llama-bpe"
    tokens = gpt2_metadata[BASE + "tokens"]
    tokens[-1] = "zqzq"
    gpt2_metadata[BASE + "token_type"][-1] = 1
    assert load_tokenizer_from_gguf(gpt2_metadata).encode("zqzq") == [1, len(tokens) - 1]
    gpt2_metadata[BASE + "pre"] = "qwen2"
    assert len(load_tokenizer_from_gguf(gpt2_metadata).encode("zqzq")) > 1


def replace(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.__setitem__(BASE + key, value)


def change(key: str, index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata[BASE + key].__setitem__(index, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replace("model", None), "model: missing"),
        (replace("model", 3), "model: must be a string"),
        (replace("model", "t5"), "'t5' is not supported"),
        (replace("pre", "klingon"), "'klingon' is not supported; supported are .*smollm"),
        (replace("pre", 1), "pre: must be a string"),
        (replace("tokens", None), "tokens: missing"),
        (replace("tokens", "abc"), "tokens: must be an array"),
        (replace("tokens", []), "bos_token_id: 1 is not among the 0 tokens"),
        (change("tokens", 5, b"x"), r"tokens\[5\]: must be a string"),
        (change("tokens", 5, "<|im_end|>"), "tokens: '<|im_end|>' occurs twice"),
        (replace("token_type", [1, 2]), "token_type: holds 2 values"),
        (change("token_type", 7, 9), r"token_type\[7\]: 9 is none of"),
        (change("token_type", 7, "1"), r"token_type\[7\]: '1' is none of"),
        (replace("merges", 5), "merges: must be an array"),
        (change("merges", 2, "nospace"), r"merges\[2\]: 'nospace' is not two tokens"),
        (change("merges", 2, "a b c"), r"merges\[2\]: 'a b c' is not two tokens"),
        (change("merges", 2, "zz qq"), r"merges\[2\]: 'zz' is not among the tokens"),
        (lambda m: m[BASE + "merges"].append(m[BASE + "merges"][0]), "merges: .* occurs twice"),
        (replace("bos_token_id", 10**6), "bos_token_id: 1000000 is not among"),
        (replace("eos_token_id", -1), "eos_token_id: -1 is not among"),
        (replace("eos_token_id", "2"), "eos_token_id: must be an integer"),
        (replace("eos_token_id", True), "eos_token_id: must be an integer"),
        (replace("add_bos_token", 1), "add_bos_token: must be a bool"),
        (lambda m: m.update({"tokenizer.chat_template": 5}), "chat_template: must be a string"),
    ],
)
def test_damaged_byte_level_metadata_is_named(
    gpt2_metadata: dict[str, Any], damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    damage(gpt2_metadata)
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")):
        load_tokenizer_from_gguf(gpt2_metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replace("scores", None), "scores: missing"),
        (replace("scores", [0.0]), "scores: holds 1 values"),
        (change("scores", 3, float("nan")), r"scores\[3\]: must be a number"),
        (change("scores", 3, "high"), r"scores\[3\]: must be a number"),
        (change("tokens", 4, "<s>"), "tokens: '<s>' occurs twice"),
    ],
)
def test_damaged_sentencepiece_metadata_is_named(
    spm_metadata: dict[str, Any], damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    damage(spm_metadata)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer_from_gguf(spm_metadata)


@given(data=st.data())
def test_hostile_metadata_never_fails_otherwise(
    spm_table: dict[str, Any], data: st.DataObject
) -> None:
    metadata = dict(spm_table)
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(),
        st.lists(st.one_of(st.integers(), st.text(max_size=3), st.floats()), max_size=5),
    )  # fmt: skip
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        metadata[key] = data.draw(junk)
    with contextlib.suppress(CheckpointError):
        tokenizer = load_tokenizer_from_gguf(metadata)
        tokenizer.decode(tokenizer.encode("the dog é"))


def test_empty_tokens_and_missing_types_are_tolerated() -> None:
    metadata = {
        BASE + "model": "llama",
        BASE + "tokens": ["", "<s>", "</s>", "", "a", "b", "ab"],
        BASE + "scores": [0.0] * 4 + [-2.0, -3.0, -1.0],
    }
    tokenizer = load_tokenizer_from_gguf(metadata)
    assert tokenizer.encode("abz") == [1, 6]
    assert tokenizer.decode([1, 3, 6, 2]) == "ab"


def test_chat_templates(gpt2_metadata: dict[str, Any]) -> None:
    assert load_tokenizer_from_gguf(gpt2_metadata).chat_template is None
    gpt2_metadata["tokenizer.chat_template"] = "D"
    gpt2_metadata["tokenizer.chat_template.tool_use"] = "T"
    gpt2_metadata["tokenizer.chat_templates"] = ["tool_use"]
    tokenizer = load_tokenizer_from_gguf(gpt2_metadata)
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "T"}
    tokenizer = load_tokenizer_from_gguf(gpt2_metadata, chat_template="{{ 'mine' }}")
    assert tokenizer.chat_templates == {"default": "{{ 'mine' }}"}
    with pytest.raises(ConfigError, match="line 1"):
        load_tokenizer_from_gguf(gpt2_metadata, chat_template="{% if %}")
