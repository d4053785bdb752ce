"""Grammars by llguidance."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.llguidance_source import llguidance_source
from quire.grammar.matcher import BackendGrammar, MaskedMatcher, StateMatcher
from quire.grammar.probing import Prober
from quire.grammar.vocabulary import Vocabulary

_MAX_MASK_THREADS = 4
_MAX_ALONE = 2
"""Masks that are filled without waking threads."""
_MAX_MESSAGE = 500


class LlguidanceBackend:
    """Compiles by llguidance; the vocabulary is read in when the backend is made, which takes parts of a second."""

    def __init__(self, vocabulary: Vocabulary, prober: Prober) -> None:
        from llguidance import LLExecutor

        self._vocabulary = vocabulary
        self._prober = prober
        self._tokenizer = make_tokenizer(vocabulary)
        self._limits = make_limits()
        self._masks = _Masks(LLExecutor(min(_MAX_MASK_THREADS, os.cpu_count() or 1)))

    def compile(self, constraint: Constraint) -> BackendGrammar:
        """See Backend. Whether a grammar can be compiled depends on the vocabulary only by the special tokens that it names."""
        vocabulary = self._vocabulary
        special = sorted(vocabulary.special_token_ids)
        spelled = [vocabulary.tokens[token_id].decode("utf-8", errors="replace") for token_id in special]
        self._prober.probe(
            {"backend": "llguidance", "size": vocabulary.size, "special": special, "spelled": spelled}, constraint
        )
        matcher = compile_source(self._tokenizer, llguidance_source(constraint, vocabulary), self._limits)
        _check_beginning(matcher.deep_copy(), vocabulary.num_mask_words)
        return BackendGrammar(matcher.deep_copy, LlguidanceMatcher, self._masks, vocabulary.end_token_id)

    def close(self) -> None:
        """See Backend."""


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return the vocabulary as llguidance has it."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_TokenSource(vocabulary)))


class _TokenSource:
    """What TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token_id
        self.tokens = [*vocabulary.tokens, b"<|end of output|>"]
        self.special_token_ids = [*sorted(vocabulary.special_token_ids), vocabulary.end_token_id]
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8"))


def make_limits() -> Any:
    """Return what bounds a compilation and a mask: counts, not times."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_source(tokenizer: Any, source: str, limits: Any) -> Any:
    """Return a matcher at the beginning. Raises GrammarError."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        message = " ".join(matcher.get_error().split())
        raise GrammarError(message[:_MAX_MESSAGE])
    return matcher


def _check_beginning(matcher: Any, num_words: int) -> None:
    """Raise GrammarError where nothing can begin an output, which only its first mask shows, or where that takes too much."""
    words = np.zeros(num_words, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if matcher.is_error():
        raise GrammarError(f"no output can begin: {' '.join(matcher.get_error().split())[:_MAX_MESSAGE]}")


class _Masks:
    """Fills masks in threads of llguidance's own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def fill(self, matchers: Sequence[MaskedMatcher], words: Any) -> list[str | None]:
        """See MaskSource."""
        states = [cast("LlguidanceMatcher", matcher).state for matcher in matchers]
        errors: list[str | None] = [state.get_error() or None if state.is_error() else None for state in states]
        usable = [(state, row) for row, state in enumerate(states) if errors[row] is None]
        num_bytes = words.shape[1] * words.itemsize
        if len(usable) <= _MAX_ALONE:
            for state, row in usable:
                state.unsafe_compute_mask_ptr(words.ctypes.data + row * num_bytes, num_bytes)
        else:
            self._executor.unsafe_compute_mask_ptr(usable, words.ctypes.data, num_bytes, len(words))
        for state, row in usable:
            if state.is_error():
                errors[row] = state.get_error()
        return [
            None if error is None else f"the grammar cannot go on: {' '.join(error.split())[:_MAX_MESSAGE]}" for error in errors
        ]


class LlguidanceMatcher(StateMatcher):
    """See MaskedMatcher."""

    __slots__ = ()

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        if self.state.consume_token(token_id):
            return None
        return f"the grammar does not take token {token_id}: {' '.join(self.state.get_error().split())[:_MAX_MESSAGE]}"

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        return (
            None if self.state.rollback(num_tokens) else f"the grammar cannot go back: {self.state.get_error()[:_MAX_MESSAGE]}"
        )

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        count = self.state.validate_tokens(list(token_ids))
        return None if self.state.is_error() else count

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher. Where the text is forced, so are its tokens: llguidance then lets through none but these."""
        return self.state.compute_ff_tokens()

    def narrow(self, words: Any) -> None:
        """See MaskedMatcher."""

    def fork(self) -> LlguidanceMatcher:
        """See GrammarMatcher."""
        return LlguidanceMatcher(self.state.deep_copy(), self._masks, self.end_token_id)

    @property
    def can_end(self) -> bool:
        """See GrammarMatcher."""
        return self.state.is_accepting()

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        return self.state.is_stopped() and not self.state.is_error()
