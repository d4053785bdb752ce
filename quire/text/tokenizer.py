"""Tokenizer: text to token ids and back, and the chat template of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from quire.base.bundled import tokenizer_folder
from quire.base.errors import ModelFormatError, RequestError
from quire.base.gguf_file import is_gguf
from quire.text.chat_template import ChatTemplate
from quire.text.template_choice import read_template
from quire.text.template_hiding import RenderedChat, matches
from quire.text.token_streams import TokenStream, Utf8Stream
from quire.text.tokenizer_files import read_tokenizer_files


class TokenizerBackend(Protocol):
    """The interface of a tokenizing library."""

    vocab_size: int
    special_token_ids: frozenset[int]
    added_tokens: Mapping[str, int]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_without(self, text: str, hidden: frozenset[str], is_first: bool = True) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def id_of(self, token: str) -> int | None: ...

    def bytes_of(self, token_id: int) -> bytes: ...

    def new_stream(self) -> TokenStream: ...


@runtime_checkable
class PartsEncoder(Protocol):
    """A backend that knows how the checkpoint joins two texts."""

    def encode_parts(self, texts: Sequence[str]) -> tuple[list[int], list[int | None]]: ...


class Tokenizer:
    """The tokenizer of a checkpoint; use `load_tokenizer` to make one. Thread-safe.

    vocab_size         one more than the highest id with a token; a model may have more rows
    special_token_ids  the tokens that skip_special_tokens leaves out
    named_tokens       "bos_token" -> "<s>" and so on, as chat templates see them
    template_file      names the file of the chat template in error messages
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        named_tokens: dict[str, str],
        template_source: str | None = None,
        template_file: Path | None = None,
    ) -> None:
        self.backend = backend
        self.named_tokens = named_tokens
        self.vocab_size = backend.vocab_size
        self.special_token_ids = backend.special_token_ids
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.chat_template = None if template_source is None else ChatTemplate(template_source, named_tokens, template_file)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; add_special_tokens adds the checkpoint's (such as <s>) around it. Raises RequestError."""
        if not isinstance(text, str):
            raise RequestError(f"prompt must be a string, got a {type(text).__name__}", "prompt")
        self._check_text(text)
        return self.backend.encode(text, add_special_tokens)

    def encode_parts(self, texts: Sequence[str]) -> tuple[list[int], list[int | None]]:
        """Return the ids of one text or a pair of them in one prompt, and of each token its text, None for special ones.

        If the checkpoint does not define how texts are joined, they are concatenated. Raises RequestError.
        """
        for text in texts:
            self._check_text(text)
        if isinstance(self.backend, PartsEncoder):
            return self.backend.encode_parts(texts)
        plain = [self.backend.encode(text, False) for text in texts]
        whole, joined = self.backend.encode(texts[0], True), [token_id for part in plain for token_id in part]
        starts = range(len(whole) - len(plain[0]) + 1)
        start = next((start for start in starts if whole[start : start + len(plain[0])] == plain[0]), 0)
        before, after = whole[:start], whole[start + len(plain[0]) :]
        of_texts: list[int | None] = [index for index, part in enumerate(plain) for _ in part]
        return [*before, *joined, *after], [*[None] * len(before), *of_texts, *[None] * len(after)]

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of a text that continues an output: without the space that the tokenizer adds before a text.

        Special tokens in it are ordinary text. If the tokenizer normalizes the text, or lacks a character, the tokens have
        other bytes than the text: `quire.grammar.spelling` tokenizes it exactly. Raises RequestError.
        """
        self._check_text(text)
        return self.backend.encode_continuation(text)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; ids without a token have none, invalid UTF-8 becomes U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return self.backend.decode([token_id for token_id in token_ids if token_id not in skipped])

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's contribution to a text, in UTF-8, possibly a part of a character."""
        return self.backend.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Return one token's contribution to a text, including a leading space; parts of characters become U+FFFD."""
        return self.backend.bytes_of(token_id).decode("utf-8", errors="replace")

    def id_of(self, token: str) -> int | None:
        """Return the id of a token given by its spelling in the vocabulary, None for an unknown one."""
        return self.backend.id_of(token)

    def new_stream(self) -> TokenStream:
        """Return a stream whose joined text equals `decode` of the same tokens; see IncrementalDetokenizer."""
        return self.backend.new_stream()

    def new_exact_stream(self) -> TokenStream:
        """Return a stream whose joined text is `token_bytes` of the same tokens, as used by grammars."""
        return Utf8Stream(self.backend.bytes_of, strips_first_space=False)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation, special tokens included. Raises RequestError, with `param`.

        kwargs  further variables of the template, such as enable_thinking
        """
        return self._template().render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> RenderedChat:
        """Return the text of a conversation for `encode_rendered`, with text that only looks like special tokens marked.

        Raises RequestError.
        """
        return self._template().render_hiding(
            self._control_tokens, messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )

    def encode_rendered(self, chat: RenderedChat) -> list[int]:
        """Return the ids of a rendered conversation. Special tokens that a client spelled out become ordinary text.

        Raises RequestError if that is not possible.
        """
        if not chat.literal_spans:
            return self.encode(chat.text, add_special_tokens=False)
        token_ids: list[int] = []
        for text, is_literal in _split_at_tokens(chat, self._added_pattern, self.backend.added_tokens):
            if is_literal:
                token_ids += self._encode_literally(text, is_first=not token_ids)
            elif text:
                token_ids += self.encode(text, add_special_tokens=False)
        return token_ids

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the ids of a conversation; the template has written the special tokens, so none are added.

        Special tokens spelled out in messages (except the assistant's) and in tools become ordinary text.
        """
        chat = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)
        return self.encode_rendered(chat)

    @staticmethod
    def _check_text(text: str) -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt is not valid Unicode: {error.reason} at character {error.start}", "prompt") from None

    @cached_property
    def _control_tokens(self) -> frozenset[str]:
        """The added tokens with a meaning for the model: special ones, and those that the template writes."""
        source = self._template().source
        added = self.backend.added_tokens.items()
        return frozenset(
            text
            for text, token_id in added
            if text.strip() and (token_id in self.special_token_ids or (len(text) > 2 and text in source))
        )

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        ordered = sorted(self.backend.added_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ordered)) or "(?!)")

    def _encode_literally(self, text: str, is_first: bool) -> list[int]:
        self._check_text(text)
        token_ids = self.backend.encode_without(text, self._control_tokens, is_first)
        forbidden = {self.backend.added_tokens[token] for token in self._control_tokens}
        found = next((token_id for token_id in token_ids if token_id in forbidden), None)
        if found is not None and not self._is_unknown(found):
            raise RequestError(
                f"messages spell out the special token {self.token_text(found)!r}, which this tokenizer cannot write as text",
                "messages",
            )
        return token_ids

    def _is_unknown(self, token_id: int) -> bool:
        return token_id == self._named_id("unk_token")

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                "messages need a chat template, and this checkpoint has none (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): send a prompt, or add a template to the checkpoint",
                "messages",
            )
        return self.chat_template

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.id_of(token)


def _split_at_tokens(chat: RenderedChat, added: re.Pattern[str], tokens: Iterable[str]) -> list[tuple[str, bool]]:
    """Return the text in parts, and whether a part holds spans; such a part extends to the real tokens around it.

    added  finds any of the tokens
    """
    span_starts = [start for start, _ in chat.literal_spans]
    longest = max((len(text) for text in tokens), default=1)
    parts: list[tuple[str, bool]] = []
    begin, section, position, next_span = 0, 0, 0, 0
    has_spans = False
    while True:
        limit = span_starts[next_span] if next_span < len(span_starts) else len(chat.text)
        found = next(matches(added, longest, chat.text, position, limit), None)
        if found is not None and has_spans:
            parts += [(chat.text[begin:section], False), (chat.text[section : found.start()], True)]
            begin, has_spans = found.start(), False
        if found is not None:
            position = section = found.end()
        elif next_span < len(span_starts):
            has_spans = True
            position = chat.literal_spans[next_span][1]
            next_span += 1
        else:
            break
    if has_spans:
        return [*parts, (chat.text[begin:section], False), (chat.text[section:], True)]
    return [*parts, (chat.text[begin:], False)]


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder: tokenizer.json, else tokenizer.model, else vocab.json and merges.txt.

    `folder` may be a GGUF file, which holds its own. chat_template: a file or a name, see `read_template`; None: the default.
    Raises ModelFormatError for missing or damaged files, UnsupportedError where an optional library is missing, ConfigError for
    a chat template that is not there.
    """
    tokenizer = _load_tokenizer(Path(folder))
    if chat_template is not None:
        source, file = read_template(Path(folder), chat_template)
        tokenizer.chat_template = ChatTemplate(source, tokenizer.named_tokens, file)
    return tokenizer


def _load_tokenizer(folder: Path) -> Tokenizer:
    folder = tokenizer_folder(folder)
    if is_gguf(folder):
        from quire.text.gguf_tokenizer import load_gguf_tokenizer

        return Tokenizer(*load_gguf_tokenizer(folder), folder)
    files = read_tokenizer_files(folder)
    named_tokens = files.named_tokens
    backend: TokenizerBackend
    if (folder / "tokenizer.json").is_file():
        from quire.text.tokenizers_backend import load_tokenizer_json

        backend = load_tokenizer_json(files)
    elif (folder / "tokenizer.model").is_file():
        from quire.text.sentencepiece_backend import load_sentencepiece

        backend = load_sentencepiece(files)
        named_tokens = {**backend.named_tokens, **named_tokens}
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        from quire.text.tokenizers_backend import load_vocab_and_merges

        backend = load_vocab_and_merges(files)
        if not named_tokens and backend.id_of("<|endoftext|>") is not None:
            named_tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    else:
        raise ModelFormatError(
            f"{folder} has no tokenizer: looked for tokenizer.json, tokenizer.model, and vocab.json with merges.txt"
        )
    return Tokenizer(backend, named_tokens, files.template_source, files.template_file)
