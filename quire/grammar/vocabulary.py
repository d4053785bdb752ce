"""Vocabulary: the tokens of a model, as the bytes that they add to a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.grammar.spelling import Spelling


class TokenSource(Protocol):
    """The part of a tokenizer's interface that is needed."""

    vocab_size: int
    special_token_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def id_of(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A token for each logit of a model; tokens without a text are empty, and no grammar allows them.

    An additional token end_token_id follows them: it is never sampled, and is allowed where an output may end. So the number of
    a model's own end tokens does not matter; there may be none.

    special_token_ids  tokens that are not text: a grammar has to name them
    spelling           text to tokens
    id_of              a token by its spelling
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    spelling: Spelling
    id_of: Callable[[str], int | None]

    @property
    def size(self) -> int:
        """Number of tokens of the model."""
        return len(self.tokens)

    @property
    def end_token_id(self) -> int:
        """The token that represents an end."""
        return len(self.tokens)

    @property
    def num_mask_words(self) -> int:
        """Number of 32-bit words of a mask: a bit per token and one for the end."""
        return (len(self.tokens) + 32) // 32

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that continues an output, exactly: see Spelling.encode."""
        return self.spelling.encode(text)

    def special_id_of(self, text: str) -> int | None:
        """Return the special token with this spelling."""
        token_id = self.id_of(text)
        return token_id if token_id in self.special_token_ids else None


def read_vocabulary(tokenizer: TokenSource, size: int) -> Vocabulary:
    """Return the vocabulary of a model with `size` logits; the tokenizer may have fewer or more tokens."""
    num_known = min(size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_known)] + [b""] * (size - num_known)
    special = frozenset(token_id for token_id in tokenizer.special_token_ids if token_id < size)
    spelling = Spelling(tokens, special, (lambda text: tokenizer.encode(text, False), tokenizer.encode_continuation))
    return Vocabulary(tuple(tokens), special, spelling, tokenizer.id_of)
