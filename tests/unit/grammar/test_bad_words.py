"""Banned phrases: no way to cut one into tokens gets through, and nothing else is lost; against brute force."""

import random

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.grammar.bad_words import BannedGrammar, BannedPhrases, TokenIndex
from quire.grammar.compiler import GrammarCompiler, GrammarContext
from quire.grammar.free_text import FreeGrammar
from tests.unit.grammar.byte_vocabulary import allowed_ids, make_vocabulary

PIECES = ("ab", "ba", "abc", "cab", "bb", "b c", " c", "aab", "ca", "éa", "\xff")


def free_vocabulary(pieces=PIECES):
    return make_vocabulary(pieces, size=300)


def ban(vocabulary, *phrases):
    return BannedGrammar(FreeGrammar(vocabulary), BannedPhrases(phrases, vocabulary, TokenIndex(vocabulary)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "phrases",
    [("abc",), ("ab", "bab"), ("aa",), ("abab", "ba c"), ("é",), ("a", "bcb"), ("cab", "ab c", "bca", "b"), ("aabaab",)],
)
def test_masks_are_those_of_brute_force_when_phrases_are_banned(phrases):
    vocabulary = free_vocabulary()
    grammar = ban(vocabulary, *phrases)
    encoded = [phrase.encode() for phrase in phrases]
    rng = random.Random(7)
    usable = [token_id for token_id in range(300) if set(vocabulary.tokens[token_id]) <= set("abc é".encode())]
    for _ in range(40):
        matcher, text = grammar.new_matcher(), b""
        for _ in range(12):
            found = allowed_ids(matcher, vocabulary.size)
            # The text has none of them so far, which is asserted below, so there is a new one where there is one.
            expected = {
                token_id
                for token_id, token in enumerate(vocabulary.tokens)
                if token_id == 256 or not any(word in text + token for word in encoded)
            }
            assert found == expected, (text, phrases)
            token_id = rng.choice(sorted(found & set(usable)))
            assert matcher.advance(token_id) is None
            text += b"" if token_id == 256 else vocabulary.tokens[token_id]
            assert not any(word in text for word in encoded)


def test_phrase_may_begin_in_the_prompt_when_it_would_end_in_the_output():
    vocabulary = free_vocabulary()
    grammar = ban(vocabulary, "abc").after_prompt([ord("b"), ord("a"), ord("b"), 256])
    matcher = grammar.new_matcher()
    assert ord("c") not in allowed_ids(matcher, vocabulary.size)
    matcher.advance(ord("a"))
    assert ord("c") in allowed_ids(matcher, vocabulary.size)


def test_matcher_stands_where_it_stood_when_it_goes_back():
    vocabulary = free_vocabulary()
    grammar = ban(vocabulary, "abcab")
    rng = random.Random(3)
    matcher, tokens = grammar.new_matcher(), []
    for _ in range(200):
        if tokens and rng.random() < 0.4:
            num_back = rng.randint(1, len(tokens))
            assert matcher.retreat(num_back) is None
            del tokens[-num_back:]
        else:
            tokens.append(ord(rng.choice("abc")))
            matcher.advance(tokens[-1])
        other = grammar.new_matcher()
        for token_id in tokens:
            other.advance(token_id)
        assert allowed_ids(matcher, 300) == allowed_ids(other, 300) == allowed_ids(matcher.fork(), 300)
        draft = [ord(rng.choice("abc")) for _ in range(6)]
        num_fitting = matcher.num_fitting(draft)
        for index, token_id in enumerate(draft):
            if token_id not in allowed_ids(other, 300):
                assert num_fitting == index
                break
            other.advance(token_id)
        else:
            assert num_fitting == len(draft)


def test_constraint_and_ban_hold_together():
    pytest.importorskip("llguidance")
    from quire.contracts.constraint import Constraint

    vocabulary = free_vocabulary()
    compiler = GrammarCompiler(lambda: vocabulary)
    try:
        regex = Constraint(kind="regex", source="[ab]{4}")
        matcher = compiler.start(regex, ("aba",), GrammarContext(prompt_token_ids=(ord("a"),))).result().new_matcher()
        assert {t for t in allowed_ids(matcher, 300) if t < 256} == {ord("a"), ord("b")}
        assert vocabulary.tokens.index(b"ba") not in allowed_ids(matcher, 300)
        assert not matcher.is_complete
        for letter in "bbab":
            assert ord(letter) in allowed_ids(matcher, 300)
            matcher.advance(ord(letter))
        assert matcher.is_complete
        with pytest.raises(RequestError, match="64|65536") as caught:
            compiler.start(None, tuple(f"{index:04}" + "x" * 3000 for index in range(30))).result()
        assert caught.value.param == "bad_words"
    finally:
        compiler.close()


def test_masks_are_kept_by_state():
    vocabulary = free_vocabulary()
    phrases = BannedPhrases(["abc", "bcd"], vocabulary, TokenIndex(vocabulary))
    assert phrases.mask(0) is phrases.mask(0)
    assert phrases.after(phrases.after(0, ord("x")), ord("y")) == 0
    assert np.array_equal(phrases.mask(0), phrases.mask(phrases.after(0, ord("x"))))
