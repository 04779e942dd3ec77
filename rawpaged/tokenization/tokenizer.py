"""Text to token ids and back, and chat messages to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from rawpaged.errors import InvalidRequestError
from rawpaged.tokenization.chat_template import (
    check_variables,
    choose_chat_template,
    compile_chat_template,
    read_chat_template,
)
from rawpaged.tokenization.detokenizer import IncrementalDetokenizer
from rawpaged.tokenization.token_bytes import TokenBytes
from rawpaged.tokenization.tokenizer_files import (
    add_configured_tokens,
    read_backend,
    read_chat_templates,
    read_token_settings,
    special_token_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Text of the tokens that chat templates may name; None for those a model does not have."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


_SHORT_TEXT = 4096
"""Characters that take about a millisecond."""
_SHORTENING = 4
"""Times that normalising may shorten a text, and to spare: NFC composes up to three characters."""


class Tokenizer:
    """A model's tokenizer and chat template; safe to use from several threads.

    `affixes` are the ids that encoding with special tokens puts before and after a text; without
    them the post-processor of `backend` decides.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: SpecialTokens,
        chat_templates: Mapping[str, str],
        affixes: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        # A limit or a padding length stored with a tokenizer belongs to its training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._affixes = affixes
        self.special_tokens = special_tokens
        self.chat_templates = dict(chat_templates)
        """By name; "default" is the one for requests that name none."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the largest id; a model's output layer may be padded beyond it."""
        self.bos_token_id = self._id_of(special_tokens.bos_token)
        self.eos_token_id = self._id_of(special_tokens.eos_token)
        self._token_bytes = TokenBytes(backend, self.vocab_size)
        self._longest_token = max(map(len, vocabulary), default=1)
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's BOS and EOS if `add_special_tokens`.

        Special tokens spelled out in the text become those tokens, as in transformers and vLLM;
        who must not let users write them has to remove them first. Raises InvalidRequestError
        for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"text is not valid Unicode: lone surrogate at character {error.start}"
            ) from None
        if self._affixes is None or not add_special_tokens:
            return self._encode(text, add_special_tokens)
        prefix, suffix = self._affixes
        return [*prefix, *self._encode(text, False), *suffix]

    def most_characters(self, num_tokens: int) -> int:
        """More characters than any text of so many tokens has.

        Normalising may shorten a text before it is cut into tokens, composing characters say, so
        there is room for that.
        """
        return _SHORTENING * self._longest_token * num_tokens

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= _SHORT_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the vocabulary does not have give nothing.

        As transformers does for BPE vocabularies, spaces before punctuation are left alone
        (`clean_up_tokenization_spaces` has no effect). One difference: where byte tokens of a
        SentencePiece vocabulary do not make up valid UTF-8, only the invalid bytes become U+FFFD,
        not the valid characters spelled by byte tokens next to them; what has been streamed
        could not be taken back.
        """
        detokenizer = self.incremental(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.append, token_ids), detokenizer.finish()])

    def token_text(self, token_id: int) -> str:
        """Text of one token within a text, special tokens shown.

        A leading space is kept; bytes that are no whole character show as U+FFFD.
        """
        data = self._token_bytes.following(token_id)
        return "" if data is None else data.decode(errors=self._token_bytes.errors)

    def incremental(
        self, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """Detokenizer of one output; `prompt_token_ids` is what the output continues."""
        skipped_ids = self._special_ids if skip_special_tokens else frozenset[int]()
        return IncrementalDetokenizer(self._token_bytes, skipped_ids, prompt_token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a chat, special tokens spelled out.

        `chat_template` is Jinja text, or the name of one of the model's templates;
        `chat_template_kwargs` are variables for it. Raises InvalidRequestError, whose `param`
        names the argument at fault.
        """
        source = choose_chat_template(self.chat_templates, chat_template, has_tools=bool(tools))
        user_variables = chat_template_kwargs or {}
        check_variables(user_variables)
        special = {name: text for name, text in asdict(self.special_tokens).items() if text}
        return compile_chat_template(source).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**special, "tools": tools, "documents": documents, **user_variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `apply_chat_template`; only the template adds special tokens."""
        text = self.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        try:
            return self.encode(text, add_special_tokens=False)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), "messages") from error

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer_from_directory(
    directory: Path, *, chat_template: str | None = None
) -> Tokenizer:
    """Tokenizer of a Hugging Face directory, or of a tokenizer.json and the files beside it.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat template
    files; `chat_template` (Jinja text or a file name) takes the place of the latter. Raises
    CheckpointError, naming the file, for what is missing or damaged.
    """
    path = directory if directory.is_file() else directory / "tokenizer.json"
    directory = path.parent
    backend = read_backend(path)
    settings = read_token_settings(directory)
    add_configured_tokens(backend, settings)
    if chat_template is None:
        templates = read_chat_templates(directory, settings)
    else:
        templates = {"default": read_chat_template(chat_template)}
    return Tokenizer(
        backend,
        special_tokens=SpecialTokens(
            bos_token=special_token_text(settings, "bos_token"),
            eos_token=special_token_text(settings, "eos_token"),
            pad_token=special_token_text(settings, "pad_token"),
            unk_token=special_token_text(settings, "unk_token"),
        ),
        chat_templates=templates,
        affixes=_configured_affixes(backend, settings),
    )


def _configured_affixes(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any]
) -> tuple[list[int], list[int]] | None:
    """What add_bos_token and add_eos_token ask for; None if neither is given.

    If one is, transformers puts them in the place of tokenizer.json's post-processor.
    """
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return None
    affixes: list[list[int]] = []
    for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        text = special_token_text(settings, name) if settings.get(flag) else None
        token_id = None if text is None else backend.token_to_id(text)
        affixes.append([] if token_id is None else [token_id])
    return affixes[0], affixes[1]
