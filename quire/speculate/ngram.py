"""N-gram proposer, or prompt lookup: drafts what followed a previous occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.occurrences import OccurrenceIndex
from quire.speculate.proposer import Proposer

_MAX_PLACES = 16


@dataclass(slots=True)
class _Memo:
    index: OccurrenceIndex
    found: tuple[int, ...] = field(default=())


class NgramProposer(Proposer):
    """Drafts what followed the latest of the longest matches in prompt and output."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._min_match, self._max_match = config.prompt_lookup_min, config.prompt_lookup_max

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        if sequence.memo is None:
            sequence.memo = _Memo(OccurrenceIndex(self._min_match))
        memo, tokens = sequence.memo, sequence.token_ids
        memo.index.extend(tokens)
        _, places = memo.index.find(tokens, tokens, self._max_match, _MAX_PLACES)
        memo.found = _continuation(tokens, places[0], limit) if places else ()
        return len(memo.found)

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        return [Draft.chain(sequence.memo.found[:limit]) for sequence, limit in wanted]


def _continuation(tokens: list[int], place: int, limit: int) -> tuple[int, ...]:
    """Return the tokens after `place`; past the end of the text they repeat with the period of the match."""
    period = len(tokens) - place
    return tuple(tokens[place + offset % period] for offset in range(limit))
