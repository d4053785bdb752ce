"""Suffix proposer: a vote of all places where the last tokens stood before, in the request and in past responses.

After Oliaro et al., "SuffixDecoding" (arXiv 2411.04975): at each step the continuation that most places share, as long as
enough of them go on so; the more tokens were found equal, the more are drafted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.occurrences import OccurrenceIndex
from quire.speculate.proposer import Proposer

_MAX_PLACES = 64
_MAX_KEPT_TOKENS = 1 << 20
"""Of all past responses: an indexed token takes up to a quarter of a kilobyte."""
_END = -1
"""Stands between past responses; equal to no token."""


@dataclass(slots=True)
class _Memo:
    index: OccurrenceIndex
    found: tuple[int, ...] = field(default=())


class _Responses:
    """The past responses of one salt, one after the other, and where their runs of tokens are."""

    def __init__(self, width: int) -> None:
        self.text: list[int] = []
        self.index = OccurrenceIndex(width)
        self._sizes: deque[int] = deque()

    def add(self, token_ids: list[int]) -> None:
        self._sizes.append(len(token_ids))
        self.text += token_ids
        self.text.append(_END)
        self.index.extend(self.text)

    def drop_first(self) -> int:
        """Forget the oldest response; return how many tokens it had."""
        size = self._sizes.popleft()
        if self._sizes:
            self.index.cut(self.text, size + 1)
            del self.text[: size + 1]
        return size

    @property
    def num_kept(self) -> int:
        return len(self._sizes)


class SuffixProposer(Proposer):
    """Drafts by vote. Responses are kept per cache_salt, so that no tenant's drafts hold another's text."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._by_salt: dict[str, _Responses] = {}
        self._order: deque[str] = deque()  # salts of the responses, the oldest first
        self._num_kept_tokens = 0

    def look(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        width = self._config.prompt_lookup_min
        if sequence.memo is None:
            sequence.memo = _Memo(OccurrenceIndex(width))
        memo, tokens = sequence.memo, sequence.token_ids
        memo.index.extend(tokens)
        memo.found, score = self._vote(memo.index, tokens, tokens, limit)
        past = self._by_salt.get(sequence.request.cache_salt)
        if past is not None:
            other, other_score = self._vote(past.index, past.text, tokens, limit)
            if other_score > score:
                memo.found = other
        return len(memo.found)

    def _vote(self, index: OccurrenceIndex, text: list[int], context: list[int], limit: int) -> tuple[tuple[int, ...], float]:
        """Return the draft and the sum of its tokens' estimated probabilities."""
        config = self._config
        length, places = index.find(context, text, config.suffix_decoding_max_tree_depth, _MAX_PLACES)
        limit = min(limit, int(config.suffix_decoding_max_spec_factor * length))
        found: list[int] = []
        score, num_places = 0.0, len(places)
        while len(found) < limit:
            places = [place for place in places if place < len(text)]
            if not places:
                break
            token_id, count = Counter([text[place] for place in places]).most_common(1)[0]
            share = count / num_places
            if token_id == _END or share < config.suffix_decoding_min_token_prob:
                break
            found.append(token_id)
            score += share
            places = [place + 1 for place in places if text[place] == token_id]
        return tuple(found), score

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        return [Draft.chain(sequence.memo.found[:limit]) for sequence, limit in wanted]

    def release(self, sequence: DraftedSequence) -> None:
        """Keep the response of a sequence that ended."""
        most = self._config.suffix_decoding_max_cached_requests
        response = sequence.token_ids[sequence.num_prompt_tokens :]
        if most == 0 or len(response) <= self._config.prompt_lookup_min:
            return
        salt = sequence.request.cache_salt
        self._by_salt.setdefault(salt, _Responses(self._config.prompt_lookup_min)).add(response)
        self._order.append(salt)
        self._num_kept_tokens += len(response)
        while len(self._order) > most or self._num_kept_tokens > _MAX_KEPT_TOKENS:
            oldest = self._order.popleft()
            self._num_kept_tokens -= self._by_salt[oldest].drop_first()
            if self._by_salt[oldest].num_kept == 0:
                del self._by_salt[oldest]
