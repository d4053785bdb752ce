"""Log probabilities in both formats of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.api.openai.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from quire.serving.core.events import Position
from quire.serving.engine_client.messages import TokenLogprob
from quire.serving.openai.frames import encode_json
from quire.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity
MANY_POSITIONS = 256
"""An answer with more is written in a thread, position by position, so that the event loop can run in between."""


def encoded(entries: Sequence[Any]) -> list[Any]:
    """Return entries as JSON, each encoded by its own call: one call for all would hold the GIL until its end."""
    return [msgspec.Raw(encode_json(entry)) for entry in entries]


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent."""
    return logprob if logprob >= LOWEST else LOWEST


class LogprobWriter:
    """Writes the log probabilities of tokens.

    num_top  how many likely tokens were requested
    as_ids   tokens are written as "token_id:123"
    """

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids or tokenizer is None

    def chat(self, positions: Sequence[Position]) -> ChatLogprobs:
        """Return the entries of a chat."""
        return ChatLogprobs([self._chat_entry(position) for position in positions])

    def text_of(self, token_id: int) -> str:
        """Return the name of a token."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def top_of(self, position: Position) -> list[TokenLogprob]:
        """Return the requested number of most likely tokens, best first."""
        distinct = {entry.token_id: entry for entry in position}
        return sorted(distinct.values(), key=_order)[: self._num_top]

    def top_dict(self, position: Position) -> dict[str, float]:
        """Return the most likely tokens and the token itself; of two with the same text the more likely one is used."""
        found: dict[str, float] = {}
        for entry in (*self.top_of(position), position[0]):
            text = self.text_of(entry.token_id)
            found[text] = max(finite(entry.logprob), found.get(text, LOWEST))
        return found

    def _chat_entry(self, position: Position) -> ChatLogprob:
        chosen = position[0]
        top = [
            TopLogprob(self.text_of(entry.token_id), finite(entry.logprob), self._bytes_of(entry.token_id))
            for entry in self.top_of(position)
        ]
        return ChatLogprob(self.text_of(chosen.token_id), finite(chosen.logprob), self._bytes_of(chosen.token_id), top)

    def _bytes_of(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


class CompletionTokens:
    """The tokens of one choice of a completion, piece by piece; text_offset continues across pieces."""

    def __init__(self, writer: LogprobWriter, tokenizer: Tokenizer | None) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, text: str, positions: Sequence[Position]) -> CompletionLogprobs:
        """Return the entries of a piece of the answer."""
        return self._write(text, [(position[0].token_id, position) for position in positions])

    def write_prompt(self, text: str, token_ids: Sequence[int], positions: Sequence[Position | None]) -> CompletionLogprobs:
        """Return the entries of the prompt; the first token has none."""
        return self._write(text, list(zip(token_ids, positions, strict=True)))

    def _write(self, text: str, tokens: Sequence[tuple[int, Position | None]]) -> CompletionLogprobs:
        found = CompletionLogprobs([], [], [], [])
        at = 0
        for token_id, position in tokens:
            found.tokens.append(self._writer.text_of(token_id))
            found.token_logprobs.append(None if position is None else finite(position[0].logprob))
            found.top_logprobs.append(None if position is None else self._writer.top_dict(position))
            found.text_offset.append(self._offset + at)
            at = self._after(text, at, token_id)
        self._offset += len(text)
        return found

    def _after(self, text: str, at: int, token_id: int) -> int:
        """Return the end of the text of a token that begins at `at`; a token without text ends where it begins."""
        if self._tokenizer is None:
            return at
        piece = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        for candidate in (piece, piece.removeprefix(" ")):
            if text.startswith(candidate, at):
                return at + len(candidate)
        return at if token_id in self._tokenizer.special_token_ids else min(at + len(piece), len(text))


def prompt_logprobs(positions: Sequence[Position | None], tokenizer: Tokenizer | None, num_top: int) -> PromptLogprobs:
    """Return the log probabilities of the prompt's tokens, by token id; None for the first."""
    found: PromptLogprobs = []
    for position in positions:
        if position is None:
            found.append(None)
            continue
        distinct = {entry.token_id: entry for entry in position}
        kept = [position[0], *sorted(distinct.values(), key=_order)[:num_top]]
        found.append(
            {
                str(entry.token_id): PromptLogprob(
                    finite(entry.logprob), entry.rank, None if tokenizer is None else tokenizer.token_text(entry.token_id)
                )
                for entry in kept
            }
        )
    return found


def _order(entry: TokenLogprob) -> tuple[float, int]:
    return (-entry.logprob, entry.token_id) if entry.rank is None else (entry.rank, entry.token_id)
