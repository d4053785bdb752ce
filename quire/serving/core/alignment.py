"""TokenAligner: maps parts of a text to its tokens, although text arrives later than its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from quire.serving.core.events import Position
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """A piece of text and the token that it completes; None for the beginning of a token's text whose rest is held back."""

    text: str
    token_id: int | None
    position: Position | None


class _Waiting(NamedTuple):
    token_id: int
    position: Position | None
    start: int
    end: int


class TokenAligner:
    """Splits the text of one choice into the texts of its tokens, by detokenising them again.

    Text is held back while a stop string may begin in it, and while a character is incomplete: a token waits for the text that
    it belongs to. The joined pieces always equal the whole text so far.

    is_exact  see IncrementalDetokenizer
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int], is_exact: bool = False
    ) -> None:
        self._tokens = IncrementalDetokenizer(tokenizer, skip_special_tokens, after=prompt_token_ids, is_exact=is_exact)
        self._waiting: deque[_Waiting] = deque()
        self._open: list[tuple[int, Position | None]] = []
        self._num_known = 0  # characters of the tokens so far
        self._num_given = 0  # characters of the texts so far

    def feed(self, text: str, token_ids: Sequence[int], positions: Sequence[Position] | None) -> list[TokenText]:
        """Add tokens and return the text in pieces."""
        if len(token_ids) == 1 and not self._waiting and not self._open:
            token_id = token_ids[0]
            position = positions[0] if positions else None
            piece = self._tokens.append(token_ids)
            if piece and piece == text:
                self._num_known += len(text)
                self._num_given = self._num_known
                return [TokenText(text, token_id, position)]
            self._add(token_id, position, piece)
        else:
            for offset, token_id in enumerate(token_ids):
                self._add(token_id, positions[offset] if positions else None, self._tokens.append((token_id,)))
        return self._cut(text)

    def finish(self, text: str, is_cut: bool) -> list[TokenText]:
        """Return the last text in pieces, then the tokens without text.

        is_cut  the text was cut before a stop string: tokens that lie completely after the cut are dropped
        """
        rest = self._tokens.finish()
        end = self._num_known + len(rest)
        self._waiting.extend(_Waiting(token_id, position, self._num_known, end) for token_id, position in self._open)
        self._open = []
        pieces = self._cut(text)
        left = [item for item in self._waiting if not is_cut or item.start < self._num_given]
        self._waiting.clear()
        return pieces + [TokenText("", item.token_id, item.position) for item in left]

    def _add(self, token_id: int, position: Position | None, piece: str) -> None:
        self._open.append((token_id, position))
        if not piece:
            return  # an incomplete character, or a token without text: it belongs to the next text
        start = self._num_known
        self._num_known += len(piece)
        self._waiting.extend(_Waiting(*token, start, self._num_known) for token in self._open)
        self._open = []

    def _cut(self, text: str) -> list[TokenText]:
        start = self._num_given
        self._num_given = at = start + len(text)
        pieces: list[TokenText] = []
        done = start
        while self._waiting and self._waiting[0].end <= at:
            item = self._waiting.popleft()
            is_last = not self._waiting or self._waiting[0].end != item.end
            end = max(item.end, done) if is_last else done
            pieces.append(TokenText(text[done - start : end - start], item.token_id, item.position))
            done = end
        if done < at:
            pieces.append(TokenText(text[done - start :], None, None))
        return pieces
