"""Draft: tokens that may follow a sequence, and the sequence as proposers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import InvariantError
from quire.base.ids import SequenceId
from quire.contracts.request import Request
from quire.contracts.speculative import MAX_SPECULATIVE_TOKENS
from quire.sampling.row_state import SamplingRow

ROOT = -1
"""The parent of the first drafts: the last known token."""

_CHAIN = tuple(range(ROOT, MAX_SPECULATIVE_TOKENS))


@dataclass(frozen=True, slots=True, init=False)
class Draft:
    """A tree of tokens after the last known token of a sequence, parents before children; usually a chain.

    parents   for each token the index of its parent, ROOT for those that follow the last known token; None: a chain
    is_chain  whether every token is the parent of the next
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    is_chain: bool = field(compare=False, repr=False)

    def __init__(self, tokens: tuple[int, ...] = (), parents: tuple[int, ...] | None = None) -> None:
        chain = _CHAIN[: len(tokens)]
        if parents is None:
            parents = chain
        if len(tokens) > MAX_SPECULATIVE_TOKENS:
            raise InvariantError(f"a draft has at most {MAX_SPECULATIVE_TOKENS} tokens, not {len(tokens)}")
        is_chain = parents == chain
        if not is_chain and (len(tokens) != len(parents) or any(not ROOT <= p < i for i, p in enumerate(parents))):
            raise InvariantError(f"a draft of {len(tokens)} tokens cannot have the parents {parents}")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "is_chain", is_chain)

    @classmethod
    def chain(cls, tokens: tuple[int, ...]) -> Draft:
        """Return a draft without branches."""
        return cls(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token_id: int) -> int | None:
        """Return the index of the child of `node` with the token token_id, None if it was not drafted."""
        following = node + 1
        if following < len(self.tokens) and self.parents[following] == node and self.tokens[following] == token_id:
            return following  # the usual case, a chain
        for index in range(following + 1, len(self.tokens)):
            if self.parents[index] == node and self.tokens[index] == token_id:
                return index
        return None

    def depths(self) -> list[int]:
        """Return the depth of each token; 1 for children of the last known token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def ancestors(self) -> list[int]:
        """Return a bit mask of ancestors for each token, itself included: bit i is that of token i."""
        found: list[int] = []
        for index, parent in enumerate(self.parents):
            found.append((0 if parent == ROOT else found[parent]) | 1 << index)
        return found


NO_DRAFT = Draft()


def best_draft(tokens: Sequence[int], parents: Sequence[int], values: Sequence[float], limit: int) -> Draft:
    """Return the `limit` tokens of a tree with the highest values, in descending order.

    parents, values  of each token, parents before children; no value exceeds that of the parent. The sort is stable, so no
                     token comes before its parent
    """
    order = sorted(range(len(tokens)), key=lambda node: -values[node])[:limit]
    places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
    return Draft(tuple(tokens[node] for node in order), tuple(places[parents[node]] for node in order))


class DraftBuilder:
    """Builds a draft token by token; equal children of one parent are merged."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, parent: int, token_id: int) -> int:
        """Return the index of the child of `parent` with the token token_id; append it if there is none."""
        return self._nodes.setdefault((parent, token_id), len(self._nodes))

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """Parent and token of every node, in order of insertion."""
        return list(self._nodes)

    def build(self) -> Draft:
        """Return the draft, in order of insertion; at most MAX_SPECULATIVE_TOKENS tokens."""
        return Draft(tuple(token_id for _, token_id in self._nodes), tuple(parent for parent, _ in self._nodes))


@dataclass(slots=True, eq=False)
class DraftedSequence:
    """A sequence of the worker as proposers see it; they may write only `memo`.

    token_ids  the known tokens, a list to which the worker appends
    sampling   its sampling state
    table      [max_blocks] i64 its block table, which the worker updates
    memo       state of its proposer
    uses_short_rope  as in SequenceStart
    """

    sequence_id: SequenceId
    request: Request
    choice: int
    token_ids: list[int]
    sampling: SamplingRow
    table: NDArray[np.int64]
    memo: Any = None
    uses_short_rope: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_token_ids)
