"""Interfaces of grammar backends, in addition to contracts.constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.contracts.constraint import Constraint, Grammar, GrammarMatcher


class MaskSource(Protocol):
    """Fills the masks of matchers of one or more grammars; for different matchers in several threads at once."""

    @property
    def first_mask_s(self) -> float:
        """Estimated cost of an output's first mask in CPU seconds, infinity if unknown."""
        ...

    def fill(self, matcher: MaskedMatcher, words: Any) -> str | None:
        """Write which tokens a matcher allows next; return the error, if any.

        words  numpy [num_mask_words] i32, contiguous: a bit per token, the lowest first, that of the end last
        """
        ...


class MaskedMatcher(GrammarMatcher, Protocol):
    """A matcher with masks."""

    @property
    def source(self) -> MaskSource:
        """The source that fills its masks."""
        ...

    @property
    def end_token_id(self) -> int:
        """The bit that says whether the output may end."""
        ...

    @property
    def state(self) -> Any:
        """The state from which the source fills a mask."""
        ...

    def restrict(self, words: Any) -> None:
        """Remove from a mask, which its source has filled, the tokens that this matcher does not allow.

        words  numpy [num_mask_words] i32
        """
        ...

    def forced_bytes(self) -> bytes:
        """Return the text that must come next, as far as known."""
        ...

    def fork(self) -> MaskedMatcher:
        """See GrammarMatcher."""
        ...

    def fork_ahead(self) -> MaskedMatcher:
        """Return a copy to look ahead for the same output: the two are never used at the same time."""
        ...


class ForkedGrammar:
    """A grammar whose outputs begin in a matcher's current state."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher

    def new_matcher(self) -> GrammarMatcher:
        """See Grammar."""
        return self._matcher.fork()


class StateMatcher:
    """Common part of the matchers of all backends: the backend's state, and the source of its masks."""

    __slots__ = ("_masks", "end_token_id", "state")

    def __init__(self, state: Any, masks: MaskSource, end_token_id: int) -> None:
        self.state = state
        self._masks = masks
        self.end_token_id = end_token_id

    @property
    def source(self) -> MaskSource:
        """See MaskedMatcher."""
        return self._masks


class WrappingMatcher:
    """Base of decorators around a matcher: delegates to it, and forces what it forces as far as the decorator allows that."""

    __slots__ = ("end_token_id", "inner")

    def __init__(self, inner: MaskedMatcher) -> None:
        self.inner = inner
        self.end_token_id = inner.end_token_id

    @property
    def state(self) -> Any:
        """See MaskedMatcher."""
        return self.inner.state

    @property
    def source(self) -> MaskSource:
        """See MaskedMatcher."""
        return self.inner.source

    @property
    def can_end(self) -> bool:
        """See GrammarMatcher."""
        return self.inner.can_end

    @property
    def is_complete(self) -> bool:
        """See GrammarMatcher."""
        return self.inner.is_complete

    @property
    def has_given_up(self) -> bool:
        """See GrammarMatcher."""
        return self.inner.has_given_up

    def num_fitting(self, token_ids: Sequence[int]) -> int | None:
        """See GrammarMatcher."""
        return self.inner.num_fitting(token_ids)

    def forced_bytes(self) -> bytes:
        """See MaskedMatcher."""
        return self.inner.forced_bytes()

    def forced_tokens(self) -> Sequence[int]:
        """See GrammarMatcher."""
        forced = self.inner.forced_tokens()
        return forced[: self.num_fitting(forced) or 0] if forced else forced


class BackendGrammar:
    """A compiled grammar; see contracts.constraint.Grammar.

    new_state  returns an initial state of the backend
    kind       of the matchers
    """

    def __init__(
        self,
        new_state: Callable[[], Any],
        kind: Callable[[Any, MaskSource, int], MaskedMatcher],
        masks: MaskSource,
        end_token_id: int,
    ) -> None:
        self._new_state = new_state
        self._kind = kind
        self._masks = masks
        self._end_token_id = end_token_id

    def new_matcher(self) -> MaskedMatcher:
        """See Grammar."""
        return self._kind(self._new_state(), self._masks, self._end_token_id)


class Backend(Protocol):
    """Compiles constraints for one vocabulary. Thread-safe."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile, first or only in another process, which is killed if it exceeds its limits. Raises GrammarError."""
        ...

    def close(self) -> None:
        """Remove what it has created outside of this process."""
        ...
