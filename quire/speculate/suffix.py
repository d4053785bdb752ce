"""Suffix proposer: a vote of all previous occurrences of the last tokens, in the request and in past responses.

After Oliaro et al., "SuffixDecoding" (arXiv 2411.04975): drafts what followed the longest suffix of the text that occurred
before; the longer the match, the more tokens. A path takes at each step the most frequent continuation while enough occurrences
agree; a tree takes the most frequent of all continuations. Instead of a suffix tree, the occurrences are followed token by
token: at most _MAX_PLACES of them, for as many tokens as are drafted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from quire.base.ids import SequenceId
from quire.contracts.speculative import SpeculativeConfig
from quire.speculate.acceptance import TreeRecord
from quire.speculate.draft import NO_DRAFT, ROOT, Draft, DraftedSequence
from quire.speculate.occurrences import OccurrenceIndex
from quire.speculate.proposer import Proposer

_MAX_PLACES = 64
_MAX_KEPT_TOKENS = 1 << 20
"""Tokens of all past responses; an indexed token takes up to a quarter of a kilobyte."""
_END = -1
"""Separator of past responses; equal to no token."""


@dataclass(slots=True)
class _Memo:
    index: OccurrenceIndex
    found: Draft = NO_DRAFT


class _Responses:
    """The past responses of one salt, concatenated, with an index of their runs of tokens.

    Places are those of the index, offset by what was cut from the beginning.
    """

    def __init__(self, width: int) -> None:
        self.text: list[int] = []
        self.index = OccurrenceIndex(width)
        self._num_cut = 0
        self._gone: set[int] = set()

    def add(self, token_ids: list[int]) -> range:
        """Append a response, and return its places, which never change."""
        first = self._num_cut + len(self.text) + 1
        self.text += token_ids
        self.text.append(_END)
        self.index.extend(self.text)
        return range(first, first + len(token_ids))

    def leave_out(self, places: range) -> None:
        """Exclude a response from `find`; its tokens stay until it is the oldest."""
        self._gone.update(places)

    def drop_first(self, places: range) -> None:
        """Remove the oldest response, which is not the only one."""
        size = len(places) + 1
        self.index.cut(self.text, size)
        del self.text[:size]
        self._num_cut += size
        self._gone.difference_update(places)

    def find(self, context: Sequence[int], max_match: int) -> tuple[int, list[int]]:
        """See OccurrenceIndex.find. An excluded response has a complete copy, in which the same match is found."""
        length, places = self.index.find(context, self.text, max_match, _MAX_PLACES)
        if self._gone:
            places = [place for place in places if self._num_cut + place not in self._gone]
        return length, places


@dataclass(frozen=True, slots=True)
class _Kept:
    """A response: its owner, and its places among those of its salt."""

    salt: str
    sequence_id: SequenceId
    places: range


class SuffixProposer(Proposer):
    """Drafts by vote. Responses are kept per cache_salt, so that drafts for one tenant never contain another's text."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._vote = self._tree if config.suffix_decoding_use_tree_spec else self._path
        if config.suffix_decoding_use_tree_spec:
            self.record = TreeRecord
        self._by_salt: dict[str, _Responses] = {}
        self._order: deque[_Kept] = deque()  # the oldest first, including excluded ones
        self._kept: dict[SequenceId, _Kept] = {}
        self._num_kept_tokens = 0

    def num_available(self, sequence: DraftedSequence, limit: int) -> int:
        """See Proposer."""
        width = self._config.prompt_lookup_min
        if sequence.memo is None:
            sequence.memo = _Memo(OccurrenceIndex(width))
        memo, tokens = sequence.memo, sequence.token_ids
        memo.index.extend(tokens)
        max_match = self._config.suffix_decoding_max_tree_depth
        memo.found, score = self._vote(tokens, memo.index.find(tokens, tokens, max_match, _MAX_PLACES), limit)
        past = self._by_salt.get(sequence.request.cache_salt)
        if past is not None:
            other, other_score = self._vote(past.text, past.find(tokens, max_match), limit)
            if other_score > score:
                memo.found = other
        return len(memo.found)

    def _path(self, text: list[int], match: tuple[int, list[int]], limit: int) -> tuple[Draft, float]:
        """Return the chain and the sum of its tokens' estimated probabilities; match: see OccurrenceIndex.find."""
        config = self._config
        length, places = match
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
        return Draft.chain(tuple(found)), score

    def _tree(self, text: list[int], match: tuple[int, list[int]], limit: int) -> tuple[Draft, float]:
        """Return the most frequent continuations in descending order, and the sum of the estimated probabilities."""
        config = self._config
        length, places = match
        limit = min(limit, int(config.suffix_decoding_max_spec_factor * length))
        tokens: list[int] = []
        parents: list[int] = []
        # (-number of places, insertion order, parent, token, the places after the token)
        waiting: list[tuple[int, int, int, int, list[int]]] = []
        score, num_pushed, parent, behind = 0, 0, ROOT, places
        while len(tokens) < limit:
            following: dict[int, list[int]] = {}
            for place in behind:
                if place < len(text):
                    following.setdefault(text[place], []).append(place + 1)
            for token_id, next_places in following.items():
                if token_id != _END and len(next_places) / len(places) >= config.suffix_decoding_min_token_prob:
                    heappush(waiting, (-len(next_places), num_pushed, parent, token_id, next_places))
                    num_pushed += 1
            if not waiting:
                break
            count, _, before, token_id, behind = heappop(waiting)
            parent = len(tokens)
            tokens.append(token_id)
            parents.append(before)
            score -= count
        return Draft(tuple(tokens), tuple(parents)), score / max(1, len(places))

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """See Proposer."""
        drafts: list[Draft] = []
        for sequence, limit in wanted:
            found: Draft = sequence.memo.found
            drafts.append(found if len(found) <= limit else Draft(found.tokens[:limit], found.parents[:limit]))
        return drafts

    @property
    def num_responses(self) -> int:
        """How many responses are kept, for all salts."""
        return len(self._kept)

    @property
    def num_text_tokens(self) -> int:
        """The tokens of the texts that hold them, with one between two responses."""
        return sum(len(past.text) for past in self._by_salt.values())

    def release(self, sequence: DraftedSequence) -> None:
        """Keep the response of a sequence that ended; of a preempted one the part that exists, until it is complete."""
        most = self._config.suffix_decoding_max_cached_requests
        response = sequence.token_ids[sequence.num_prompt_tokens :]
        if most == 0 or len(response) <= self._config.prompt_lookup_min:
            return
        salt, sequence_id = sequence.request.cache_salt, sequence.sequence_id
        past = self._by_salt.setdefault(salt, _Responses(self._config.prompt_lookup_min))
        part = self._kept.get(sequence_id)
        if part is not None:
            past.leave_out(part.places)
        kept = self._kept[sequence_id] = _Kept(salt, sequence_id, past.add(response))
        self._order.append(kept)
        self._num_kept_tokens += len(response)
        while len(self._kept) > most or self._num_kept_tokens > _MAX_KEPT_TOKENS:
            self._drop_first()

    def _drop_first(self) -> None:
        oldest = self._order.popleft()
        self._num_kept_tokens -= len(oldest.places)
        if self._kept[oldest.sequence_id] is oldest:
            del self._kept[oldest.sequence_id]
        past = self._by_salt[oldest.salt]
        if len(past.text) > len(oldest.places) + 1:
            past.drop_first(oldest.places)
        else:
            del self._by_salt[oldest.salt]
