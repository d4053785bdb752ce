"""Vocabulary: the tokens of a model, as the bytes that they add to a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.grammar.spelling import Spelling


class TokenSource(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int
    special_token_ids: frozenset[int]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def id_of(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A token for each logit of a model; those without a text are empty, and no grammar lets them through.

    One more, end_token_id, stands behind them: it is never sampled, and is allowed where an output may end. So it does not
    matter how many tokens of its own a model ends with, or that they are none at all.
    special_token_ids  tokens that are no text: a grammar has to name them
    spelling           text to tokens
    id_of              a token by its spelling
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    spelling: Spelling
    id_of: Callable[[str], int | None]

    @property
    def size(self) -> int:
        """Tokens of the model."""
        return len(self.tokens)

    @property
    def end_token_id(self) -> int:
        """The token that stands for an end."""
        return len(self.tokens)

    @property
    def num_mask_words(self) -> int:
        """Words of 32 bits in a mask: a bit per token and one for the end."""
        return (len(self.tokens) + 32) // 32

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that continues an output, exactly: see Spelling.encode."""
        return self.spelling.encode(text)

    def special_id_of(self, text: str) -> int | None:
        """Return the special token that is spelled like this."""
        token_id = self.id_of(text)
        return token_id if token_id in self.special_token_ids else None


def read_vocabulary(tokenizer: TokenSource, size: int) -> Vocabulary:
    """Return the tokens of a model with `size` logits; the tokenizer may know fewer or more."""
    num_known = min(size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_known)] + [b""] * (size - num_known)
    special = frozenset(token_id for token_id in tokenizer.special_token_ids if token_id < size)
    spelling = Spelling(tokens, special, (lambda text: tokenizer.encode(text, False), tokenizer.encode_continuation))
    return Vocabulary(tuple(tokens), special, spelling, tokenizer.id_of)
