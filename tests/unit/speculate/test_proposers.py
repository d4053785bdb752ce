"""What the table proposers find."""

import random
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from proposers import path_to

from quire.base.errors import InvariantError
from quire.contracts.speculative import SpeculativeConfig
from quire.speculate import suffix
from quire.speculate.draft import ROOT, Draft
from quire.speculate.ngram import NgramProposer
from quire.speculate.occurrences import OccurrenceIndex
from quire.speculate.suffix import SuffixProposer

SEQUENCE_IDS = count(100)


def sequence(tokens, num_prompt=1, salt="", sequence_id=None):
    request = SimpleNamespace(cache_salt=salt, prompt_token_ids=tuple(tokens[:num_prompt]))
    return SimpleNamespace(
        sequence_id=next(SEQUENCE_IDS) if sequence_id is None else sequence_id,
        token_ids=list(tokens),
        num_prompt_tokens=num_prompt,
        request=request,
        memo=None,
    )


def draft(proposer, one, limit=5):
    found = proposer.num_available(one, limit)
    (made,) = proposer.propose([(one, limit)])
    assert len(made) == found
    return list(made.tokens)


def test_index_finds_the_longest_match_when_compared_with_a_plain_search():
    rng = random.Random(3)
    for _ in range(200):
        width = rng.randint(1, 3)
        text = [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        index = OccurrenceIndex(width)
        for end in sorted(rng.sample(range(len(text) + 1), min(3, len(text)))):
            index.extend(text[:end])
        index.extend(text)
        limit = rng.randint(width, 8)
        lengths = {}
        for end in range(width, len(text)):
            length = 0
            while length < min(limit, end) and text[end - length - 1] == text[-length - 1]:
                length += 1
            if length >= width:
                lengths[end] = length
        longest = max(lengths.values(), default=0)
        expected = [end for end in sorted(lengths, reverse=True) if lengths[end] == longest]
        assert index.find(text, text, limit, 1000) == (longest, expected)


def test_index_of_a_text_that_was_cut_is_that_of_what_is_left():
    rng = random.Random(5)
    for _ in range(200):
        width = rng.randint(1, 4)
        text = [rng.randrange(3) for _ in range(rng.randint(20, 60))]
        cut = OccurrenceIndex(width)
        for size in (10, 20, len(text)):
            cut.extend(text[:size])
        left = text
        for _ in range(rng.randint(1, 4)):
            count = rng.randint(1, 4)
            cut.cut(left, count)
            left = [*left[count:], rng.randrange(3)]
            cut.extend(left)
        fresh = OccurrenceIndex(width)
        fresh.extend(left)
        assert cut.find(left, left, 8, 1000) == fresh.find(left, left, 8, 1000)
        assert (cut.num_runs, len(cut)) == (fresh.num_runs, len(fresh))


def test_ngram_goes_on_as_at_the_latest_of_the_longest_matches():
    proposer = NgramProposer(SpeculativeConfig(method="ngram", prompt_lookup_min=2))
    assert draft(proposer, sequence([1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 8, 2, 3])) == [5, 6, 7, 8, 2]
    assert draft(proposer, sequence([1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3])) == [4, 9, 2, 3, 5]
    assert draft(proposer, sequence([1, 2, 3])) == []


def test_ngram_repeats_what_repeats_itself():
    proposer = NgramProposer(SpeculativeConfig(method="ngram"))
    assert draft(proposer, sequence([4, 1, 2, 3, 1, 2, 3, 1, 2, 3])) == [1, 2, 3, 1, 2]


def test_suffix_goes_with_the_majority():
    proposer = SuffixProposer(SpeculativeConfig(method="suffix"))
    tokens = [0, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 1, 1, 2, 3, 7, 8, 9, 2, 3]
    assert draft(proposer, sequence(tokens))[0] == 4


def test_suffix_finds_past_responses_of_the_same_salt_alone():
    proposer = SuffixProposer(SpeculativeConfig(method="suffix"))
    proposer.release(sequence([1, 11, 12, 13, 14, 15, 16], salt="a"))
    assert draft(proposer, sequence([2, 11, 12], salt="a")) == [13, 14, 15, 16]
    assert draft(proposer, sequence([2, 11, 12], salt="b")) == []
    assert draft(proposer, sequence([2, 15, 16], salt="a")) == []  # where a response ends, nothing follows


def test_suffix_counts_a_response_once_when_its_sequence_was_preempted():
    proposer = SuffixProposer(SpeculativeConfig(method="suffix"))
    proposer.release(sequence([1, 11, 12, 13, 14, 15]))
    proposer.release(sequence([1, 11, 12, 13, 14, 16]))
    for size in (5, 6, 7, 8):
        proposer.release(sequence([1, 11, 12, 17, 18, 19, 20, 21][:size], sequence_id=7))
    assert draft(proposer, sequence([2, 11, 12]))[:2] == [13, 14]
    assert draft(proposer, sequence([2, 17, 18])) == [19, 20, 21]  # the parts had ended behind 18, 19 and 20


def test_suffix_keeps_as_many_responses_when_a_sequence_was_preempted():
    proposer = SuffixProposer(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=2))
    proposer.release(sequence([1, 31, 32, 33, 34, 35]))
    for size in (5, 6, 7, 8):
        proposer.release(sequence([1, 11, 12, 17, 18, 19, 20, 21][:size], sequence_id=7))
    assert draft(proposer, sequence([2, 31, 32])) == [33, 34, 35]
    proposer.release(sequence([1, 41, 42, 43, 44]))
    assert draft(proposer, sequence([2, 31, 32])) == []
    proposer.release(sequence([1, 51, 52, 53, 54]))
    assert draft(proposer, sequence([2, 11, 12])) == []
    assert draft(proposer, sequence([2, 41, 42])) == [43, 44]
    assert proposer.num_text_tokens == 2 * 5


def tree_of(proposer, one, limit):
    count = proposer.num_available(one, limit)
    (made,) = proposer.propose([(one, limit)])
    assert len(made) == count
    return made


def test_suffix_tree_holds_every_continuation_the_likeliest_first():
    config = SpeculativeConfig(method="suffix", suffix_decoding_use_tree_spec=True, suffix_decoding_min_token_prob=0.2)
    proposer, sure, short = (
        SuffixProposer(replace(config, **changes))
        for changes in ({}, {"suffix_decoding_min_token_prob": 0.5}, {"suffix_decoding_max_spec_factor": 1.0})
    )
    for behind in ([3, 4, 5], [3, 4, 6], [3, 7, 7], [8, 9, 9]):
        for each in (proposer, sure, short):
            each.release(sequence([0, 1, 2, *behind]))
    one = sequence([0, 1, 2])
    # Of four places three go on with 3, of which two with 4; of equal ones that which was found first.
    assert tree_of(proposer, one, 4) == Draft((3, 4, 8, 7), (ROOT, 0, ROOT, 0))
    assert proposer.propose([(one, 2)]) == [Draft((3, 4))]
    assert tree_of(sure, sequence([0, 1, 2]), 9) == Draft((3, 4))
    assert len(tree_of(short, sequence([0, 1, 2]), 9)) == 2  # as many as were found equal


def test_suffix_tree_is_the_best_of_all_trees_of_what_followed():
    rng = random.Random(7)
    config = SpeculativeConfig(method="suffix", suffix_decoding_use_tree_spec=True, suffix_decoding_min_token_prob=0.0)
    for _ in range(100):
        text = [rng.randrange(4) for _ in range(rng.randint(5, 60))]
        limit = rng.randint(1, 8)
        draft = tree_of(SuffixProposer(config), sequence(text), limit)
        _, places = (index := OccurrenceIndex(2)).extend(text) or index.find(text, text, 24, 64)
        counts = {}
        for place in places:
            for end in range(place + 1, min(len(text), place + 8) + 1):
                counts[tuple(text[place:end])] = counts.get(tuple(text[place:end]), 0) + 1
        paths = [tuple(draft.tokens[node] for node in path_to(draft, index)) for index in range(len(draft))]
        assert len(set(paths)) == len(paths)
        found = [counts[path] for path in paths]
        assert found == sorted(counts.values(), reverse=True)[: len(found)]


def test_suffix_forgets_the_oldest_responses():
    proposer = SuffixProposer(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=3))
    for first in (10, 20, 30, 40, 50, 60, 70):
        proposer.release(sequence([1, *range(first, first + 6)]))
    assert draft(proposer, sequence([0, 10, 11])) == []
    assert draft(proposer, sequence([0, 70, 71])) == [72, 73, 74, 75]
    proposer = SuffixProposer(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0))
    proposer.release(sequence([1, 11, 12, 13, 14, 15, 16]))
    assert draft(proposer, sequence([2, 11, 12])) == []


def test_suffix_keeps_no_more_tokens_than_it_may(monkeypatch):
    monkeypatch.setattr(suffix, "_MAX_KEPT_TOKENS", 20)
    proposer = SuffixProposer(SpeculativeConfig(method="suffix"))
    for number, salt in enumerate("abaab"):
        proposer.release(sequence([1, *range(10 * number, 10 * number + 8)], salt=salt))
    assert draft(proposer, sequence([0, 20, 21], salt="a")) == []
    assert draft(proposer, sequence([0, 30, 31], salt="a")) == [32, 33, 34, 35]
    assert draft(proposer, sequence([0, 10, 11], salt="b")) == []
    assert draft(proposer, sequence([0, 40, 41], salt="b")) == [42, 43, 44, 45]
    assert proposer.num_text_tokens == 2 * 9


def test_an_oldest_response_is_forgotten_without_a_look_at_the_others(monkeypatch):
    """Else a request that ends would hold up the step of all others."""
    extend, grown = OccurrenceIndex.extend, []

    def note(index, text):
        before = len(index)
        extend(index, text)
        grown.append(len(index) - before)

    monkeypatch.setattr(OccurrenceIndex, "extend", note)
    proposer = SuffixProposer(SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=50))
    for number in range(200):
        proposer.release(sequence([1, *range(100 * number, 100 * number + 40)]))
    assert sum(grown) <= 200 * 41  # nothing is indexed anew
    assert proposer.num_responses == 50
    assert proposer.num_text_tokens == 50 * 41


def test_draft_knows_its_tree():
    tree = Draft((5, 6, 7, 6), (ROOT, ROOT, 0, 2))
    assert (tree.child(ROOT, 6), tree.child(0, 7), tree.child(2, 6), tree.child(1, 7)) == (1, 2, 3, None)
    assert tree.depths() == [1, 1, 2, 3]
    assert not tree.is_chain
    assert Draft.chain((4, 4, 5)).is_chain
    with pytest.raises(InvariantError):
        Draft((1, 2), (ROOT, 1))
