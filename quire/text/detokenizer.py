"""Incremental detokenisation: text as soon as it is certain, never half a character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into pieces of text whose concatenation is `tokenizer.decode` of all tokens.

    A piece never ends in half a character. The cost is constant per token. With `after`, the tokens before the first
    one (of a prompt), the text is a continuation: a tokenizer that drops the space at the start of a text keeps it.

    is_exact  the text is exactly the bytes of the tokens, as in a grammar: no space is dropped, even
              after a prompt of special tokens only, and no spaces are cleaned up
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, after: Sequence[int] = (), is_exact: bool = False
    ) -> None:
        self._stream = tokenizer.new_exact_stream() if is_exact else tokenizer.new_stream()
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        if after and not is_exact:
            self._stream.prime([token_id for token_id in after[-64:] if token_id not in self._skipped_ids])

    def append(self, token_ids: Iterable[int]) -> str:
        """Return the new text that no later token can change."""
        skipped = self._skipped_ids
        return self._stream.push_run([token_id for token_id in token_ids if token_id not in skipped])

    def finish(self) -> str:
        """Return the remaining text; nothing may be appended afterwards."""
        return self._stream.finish()
