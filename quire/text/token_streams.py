"""Streams that turn token ids into text one at a time, each equivalent to a way of decoding all of them at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# Context tokens that determine the text at a border: leading spaces, and the first bytes of a split character.
CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"
_CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_LONGEST_CLEAN_UP = 4


class TokenStream(Protocol):
    """Returns text token by token, as soon as it is certain."""

    def prime(self, token_ids: Sequence[int]) -> None:
        """Take the tokens before the first one as context; their text is not returned. Called first, if at all."""
        ...

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        ...

    def push_run(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens together make certain."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the remaining text, at the end of the stream."""
        ...


class Utf8Stream(TokenStream):
    """Joins the bytes of tokens and decodes them as UTF-8; invalid bytes become U+FFFD as in Rust's from_utf8_lossy.

    bytes_of            the bytes of a token; empty for ids without a token
    strips_first_space  the first character of the whole text is dropped if it is a space
    """

    def __init__(self, bytes_of: Callable[[int], bytes], strips_first_space: bool) -> None:
        self._bytes_of = bytes_of
        self._strips_first_space = strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prime(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids[-CONTEXT_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        return self._strip(self._decoder.decode(self._bytes_of(token_id)))

    def push_run(self, token_ids: Sequence[int]) -> str:
        return self._strip(self._decoder.decode(b"".join([self._bytes_of(token_id) for token_id in token_ids])))

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._strips_first_space or not text:
            return text
        self._strips_first_space = False
        return text.removeprefix(" ")


class ByteFallbackStream(TokenStream):
    """Joins text tokens and runs of byte tokens, as the ByteFallback and Fuse decoders do.

    A run of byte tokens that is not valid UTF-8 becomes U+FFFD once per byte, its valid characters too; hence nothing
    of a run is certain before it ends.

    text_of             the text of a token, "" for ids without one; not asked for byte tokens
    byte_of             the byte of a byte token, None for other tokens
    strips_first_space  the first character of the whole text is dropped if it is a space
    """

    def __init__(self, text_of: Callable[[int], str], byte_of: Callable[[int], int | None], strips_first_space: bool) -> None:
        self._text_of = text_of
        self._byte_of = byte_of
        self._strips_first_space = strips_first_space
        self._run = bytearray()

    def prime(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids[-CONTEXT_TOKENS:]:
            self.push(token_id)
        self.finish()

    def push(self, token_id: int) -> str:
        byte = self._byte_of(token_id)
        if byte is not None:
            self._run.append(byte)
            return ""
        text = self._text_of(token_id)
        return self._end_run(text) if text else ""

    def finish(self) -> str:
        return self._end_run("")

    def _end_run(self, text: str) -> str:
        if self._run:
            try:
                run_text = self._run.decode("utf-8")
            except UnicodeDecodeError:
                run_text = _REPLACEMENT * len(self._run)
            self._run.clear()
            text = run_text + text
        if self._strips_first_space and text:
            self._strips_first_space = False
            return text.removeprefix(" ")
        return text


class WindowStream(TokenStream):
    """Decodes a window of tokens after a few tokens of context; for decoders with unknown rules.

    decode    text of a list of tokens
    is_open   whether text may still change after this token (a byte token)
    """

    # An invalid byte can hold back text no longer than this.
    MAX_PENDING_TOKENS = 24

    def __init__(self, decode: Callable[[list[int]], str], is_open: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_open = is_open
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def prime(self, token_ids: Sequence[int]) -> None:
        self._advance(list(token_ids))

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        is_full = len(self._pending) >= self.MAX_PENDING_TOKENS
        if self._is_open(token_id) and not is_full:
            return ""
        text = self._decode(self._context + self._pending)
        is_certain = text.startswith(self._context_text) and not text.endswith(_REPLACEMENT)
        return self._emit(text) if is_certain or is_full else ""

    def finish(self) -> str:
        return self._emit(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._advance(self._context + self._pending)
        self._pending = []
        return piece

    def _advance(self, token_ids: list[int]) -> None:
        self._context = token_ids[-CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)


class CleanUpStream(TokenStream):
    """Removes the spaces before punctuation from the text of another stream, as clean_up_spaces does from a whole text."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._held = ""

    def prime(self, token_ids: Sequence[int]) -> None:
        self._stream.prime(token_ids)

    def push(self, token_id: int) -> str:
        self._held += self._stream.push(token_id)
        # Every pattern begins with a space and has at most 4 characters: it cannot cross a border after 3 without one.
        gap = _LONGEST_CLEAN_UP - 1
        for end in range(len(self._held), gap - 1, -1):
            if " " not in self._held[end - gap : end]:
                text, self._held = self._held[:end], self._held[end:]
                return clean_up_spaces(text)
        return ""

    def finish(self) -> str:
        text, self._held = self._held + self._stream.finish(), ""
        return clean_up_spaces(text)


def clean_up_spaces(text: str) -> str:
    """Return the text without spaces before punctuation and contractions, as transformers' clean_up_tokenization."""
    for old, new in _CLEAN_UPS:
        text = text.replace(old, new)
    return text
