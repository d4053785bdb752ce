"""The llguidance backend."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.llguidance_source import llguidance_source
from quire.grammar.matcher import BackendGrammar, MaskedMatcher, StateMatcher
from quire.grammar.sandbox import SandboxedCompiler
from quire.grammar.schema_faults import NOTHING_MATCHES, plain_words
from quire.grammar.vocabulary import Vocabulary

_MAX_MESSAGE = 500
_WAYS = ('{["' + string.ascii_letters + string.digits + ":,}] ", string.ascii_letters + string.digits + '":{[,}] ')
"""Tokens of trial outputs, in order of preference: into objects and lists, or along names."""
_WAY_BYTES = 24
_MAX_WAYS_S = 0.8
_GIVEN_UP = "the grammar cannot go on"
_NOT_TAKEN = "doesn't satisfy the grammar"
"""Message for a token that masks do not allow; every other error is an error of the grammar."""
_SLOW_S = 2e-3
"""Cost of a mask above which an output gets its own grammar: copies of one share a lock, for which a step would wait."""


class LlguidanceBackend:
    """Compiles with llguidance; creating the backend reads the vocabulary, which takes a fraction of a second."""

    def __init__(self, vocabulary: Vocabulary, sandbox: SandboxedCompiler) -> None:
        self._vocabulary = vocabulary
        self._sandbox = sandbox
        self._tokenizer = make_tokenizer(vocabulary)
        self._limits = make_limits()

    def compile(self, constraint: Constraint) -> BackendGrammar:
        """See Backend. Whether a grammar compiles depends on the vocabulary only through the special tokens that it names."""
        vocabulary = self._vocabulary
        special = sorted(vocabulary.special_token_ids)
        spelled = [vocabulary.tokens[token_id].decode("utf-8", errors="replace") for token_id in special]
        setup = {"backend": "llguidance", "size": vocabulary.size, "special": special, "spelled": spelled}
        with self._sandbox.probe(setup, constraint):
            source = llguidance_source(constraint, vocabulary)

            def compile_anew() -> Any:
                return compile_source(self._tokenizer, source, self._limits)

            try:
                matcher = compile_anew()
            except GrammarError as error:
                raise GrammarError(plain_words(str(error)), error.pointer) from None
        vocabulary.spelling.check(bytes(matcher.deep_copy().compute_ff_bytes()).decode("utf-8", errors="ignore"))
        masks = _Masks(_check_beginning(matcher.deep_copy(), vocabulary.num_mask_words), compile_anew)
        return BackendGrammar(lambda: _State(matcher.deep_copy()), LlguidanceMatcher, masks, vocabulary.end_token_id)

    def close(self) -> None:
        """See Backend."""


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return llguidance's tokenizer of the vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_TokenSource(vocabulary)))


class _TokenSource:
    """The interface that TokenizerWrapper needs."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token_id
        self.tokens = [*vocabulary.tokens, b"<|end of output|>"]
        self.special_token_ids = [*sorted(vocabulary.special_token_ids), vocabulary.end_token_id]
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8"))


def make_limits() -> Any:
    """Return the limits of a compilation and a mask: counts, not times."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=20_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _raw_message(state: Any) -> str:
    return " ".join(state.get_error().split())[:_MAX_MESSAGE]


def _message(state: Any) -> str:
    return plain_words(_raw_message(state))


def compile_source(tokenizer: Any, source: str, limits: Any) -> Any:
    """Return a matcher in its initial state. Raises GrammarError with llguidance's message."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_raw_message(matcher))
    return matcher


def check_ways(matcher: Any, vocabulary: Vocabulary) -> None:
    """Follow a few trial outputs for some bytes. Raises GrammarError if none can begin, or the grammar is too complex.

    vocabulary  has all single bytes as tokens
    """
    until = time.thread_time() + _MAX_WAYS_S
    for preferred, is_varied in (*((way, False) for way in _WAYS), (_WAYS[0], True)):
        walker = matcher.deep_copy()
        num_bytes = _walk(walker, vocabulary.encode(preferred), vocabulary.num_mask_words, until, is_varied)
        message = _message(walker) if walker.is_error() else ""
        if message and (num_bytes == 0 or message != NOTHING_MATCHES):  # a dead end of a single trial does no harm
            raise GrammarError(f"no output can {'go on' if num_bytes else 'begin'}: {message}")


def _walk(walker: Any, preferred: Sequence[int], num_words: int, until: float, is_varied: bool) -> int:
    """Advance a matcher by the first of the preferred tokens that is allowed, repeatedly; return the number of steps.

    is_varied  take the allowed token that was taken least, so that repetitions are left
    """
    words = np.zeros(num_words, dtype=np.int32)
    num_taken = dict.fromkeys(preferred, 0)
    for count in range(_WAY_BYTES):
        walker.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if walker.is_error() or time.thread_time() > until:
            return count
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        allowed = [token_id for token_id in num_taken if bits[token_id]]
        if not allowed:
            return count + 1
        token_id = min(allowed, key=num_taken.__getitem__) if is_varied else allowed[0]
        num_taken[token_id] += 1
        if not walker.consume_token(token_id):
            return count + 1
    return _WAY_BYTES


def _check_beginning(matcher: Any, num_words: int) -> float:
    """Return the CPU time of the first mask in seconds.

    Raises GrammarError if nothing can begin an output, which only the mask shows, or if it takes too long.
    """
    words = np.zeros(num_words, dtype=np.int32)
    begin_s = time.thread_time()
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if matcher.is_error():
        raise GrammarError(f"no output can begin: {_message(matcher)}")
    return time.thread_time() - begin_s


class _State:
    """llguidance's state of an output.

    token_ids  of the output
    forced     tokens that must come next, None if not computed yet
    is_alone   no other output has a copy of its matcher: copies wait for each other's masks
    """

    __slots__ = ("forced", "is_alone", "matcher", "token_ids")

    def __init__(self, matcher: Any, token_ids: Sequence[int] = (), forced: Sequence[int] | None = None) -> None:
        self.matcher = matcher
        self.token_ids = list(token_ids)
        self.forced = forced
        self.is_alone = False

    def leave_copies(self, compile_anew: Callable[[], Any]) -> None:
        """Continue with a separate grammar, so that advancing a copy does not wait for a mask of this output."""
        matcher = compile_anew()
        if not self.token_ids or matcher.consume_tokens(self.token_ids):
            self.matcher, self.is_alone = matcher, True


class _Masks:
    """Fills the masks of one grammar with the GIL released."""

    def __init__(self, first_mask_s: float, compile_anew: Callable[[], Any]) -> None:
        self.first_mask_s = first_mask_s
        self._compile_anew = compile_anew

    def fill(self, matcher: MaskedMatcher, words: Any) -> str | None:
        """See MaskSource."""
        state = cast("_State", matcher.state)
        if self.first_mask_s > _SLOW_S and not state.is_alone:
            state.leave_copies(self._compile_anew)
        begin_s = time.thread_time()
        if not state.matcher.is_error():
            state.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if state.matcher.is_error():
            return f"{_GIVEN_UP}: {_message(state.matcher)}"
        if not state.is_alone and time.thread_time() - begin_s > _SLOW_S:
            state.leave_copies(self._compile_anew)
        return None


class LlguidanceMatcher(StateMatcher):
    """See MaskedMatcher."""

    __slots__ = ()

    def advance(self, token_id: int) -> str | None:
        """See GrammarMatcher."""
        matcher = self.state.matcher
        self.state.forced = None
        if matcher.consume_token(token_id):
            self.state.token_ids.append(token_id)
            return None
        if self.has_given_up:
            return f"{_GIVEN_UP}: {_message(matcher)}"
        return f"the grammar does not take token {token_id}: {_message(matcher)}"

    def retreat(self, num_tokens: int) -> str | None:
        """See GrammarMatcher."""
        matcher, token_ids = self.state.matcher, self.state.token_ids
        self.state.forced = None
        if matcher.rollback(num_tokens):
            del token_ids[len(token_ids) - num_tokens :]
            return None
        return f"the grammar cannot go back: {_message(matcher)}"

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        count = self.state.matcher.validate_tokens(list(token_ids))
        return None if self.state.matcher.is_error() else count

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher. Where the text is forced, its tokens are too: llguidance then allows only these."""
        if self.state.forced is None:
            self.state.forced = self.state.matcher.compute_ff_tokens()
        return self.state.forced

    def forced_bytes(self) -> bytes:
        """See MaskedMatcher."""
        matcher = self.state.matcher
        return b"" if matcher.is_stopped() else bytes(matcher.compute_ff_bytes())

    def restrict(self, words: Any) -> None:
        """See MaskedMatcher."""

    def fork(self) -> LlguidanceMatcher:
        """See GrammarMatcher."""
        self.state.is_alone = False
        return self._copy()

    def fork_ahead(self) -> LlguidanceMatcher:
        """See MaskedMatcher."""
        found = self._copy()
        found.state.is_alone = True  # no other output waits for it that would not wait for this one
        return found

    def _copy(self) -> LlguidanceMatcher:
        state = _State(self.state.matcher.deep_copy(), self.state.token_ids, self.state.forced)
        return LlguidanceMatcher(state, self._masks, self.end_token_id)

    @property
    def can_end(self) -> bool:
        """See GrammarMatcher."""
        return self.state.matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        return self.state.matcher.is_stopped() and not self.state.matcher.is_error()

    @property
    def has_given_up(self) -> bool:
        """See GrammarMatcher."""
        matcher = self.state.matcher
        return matcher.is_error() and _NOT_TAKEN not in matcher.get_error()
