"""Masks behind drafted tokens: those of a matcher that has taken these tokens in, whatever else was drafted."""

import json
import random
import threading

import numpy as np
import pytest

pytest.importorskip("llguidance")

from quire.contracts.constraint import Constraint
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.masks import DraftedTokens, MaskFiller, fill_masks
from tests.unit.grammar.byte_vocabulary import allowed_ids, make_vocabulary

ENDING = 299
SCHEMA = {
    "type": "object",
    "properties": {"first": {"enum": ["yes", "no", "abab"]}, "second": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["first"],
    "additionalProperties": False,
}
CASES = [
    ("json_schema", SCHEMA, "llguidance"),
    ("json_schema", SCHEMA, "xgrammar"),
    ("regex", "(ab|c){1,4}(yes)?", "llguidance"),
    ("regex", "(ab|c){1,4}(yes)?", "xgrammar"),
    ("choice", ["abab", "abc", "no", "yes"], "llguidance"),
]


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(("ab", "yes", "no", '{"', '":'), size=300)


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} {case[2]}")
def grammar(request, compiler):
    kind, source, backend = request.param
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    text = source if isinstance(source, str) else json.dumps(source)
    return compiler.start(Constraint(kind=kind, source=text, backend=backend)).result()


def after(grammar, tokens):
    matcher = grammar.new_matcher()
    assert all(matcher.advance(token_id) is None for token_id in tokens)
    return matcher


def bits(words, size):
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:size]).tolist())


def draw_tree(grammar, prefix, size, rng):
    """Return a tree of tokens, most of which can follow."""
    draft, paths = DraftedTokens([], []), []
    for _ in range(12):
        parent = rng.randrange(-1, len(paths))
        path = paths[parent] if parent >= 0 else ()
        try:
            matcher = after(grammar, prefix + path)
            allowed = sorted(allowed_ids(matcher, size) - {ENDING}) if not matcher.is_complete else []
        except AssertionError:
            allowed = []
        token_id = rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.choice([97, 98, 7, ENDING])
        draft.tokens.append(token_id)
        draft.parents.append(parent)
        paths.append((*path, token_id))
    return draft, paths


def test_masks_behind_drafts_are_those_of_fresh_matchers(grammar, vocabulary):
    rng = random.Random(3)
    num_known = 0
    for _ in range(20):
        prefix, matcher = (), grammar.new_matcher()
        while rng.random() < 0.6 and (allowed := allowed_ids(matcher, vocabulary.size)):
            prefix += (rng.choice(sorted(allowed)),)
            matcher.advance(prefix[-1])
            if matcher.is_complete:
                prefix = prefix[:-1]
                matcher = after(grammar, prefix)
                break
        draft, paths = draw_tree(grammar, prefix, vocabulary.size, rng)
        masks = fill_masks([matcher], [[ENDING]], [draft])
        assert masks.errors == [None]
        assert masks.is_broken == [False]
        assert bits(masks.words[0], vocabulary.size) == allowed_ids(after(grammar, prefix), vocabulary.size, [ENDING])
        for row, path in enumerate(paths, start=1):
            can_come = can_follow(grammar, prefix + path, vocabulary.size)
            assert masks.is_known[row] == can_come, (prefix, path)
            if can_come:
                num_known += 1
                assert bits(masks.words[row], vocabulary.size) == allowed_ids(
                    after(grammar, prefix + path), vocabulary.size, [ENDING]
                )
        assert allowed_ids(matcher, vocabulary.size) == allowed_ids(after(grammar, prefix), vocabulary.size)
    assert num_known > 50


def can_follow(grammar, tokens, size):
    """Return whether these can be taken in, and something can follow."""
    matcher = grammar.new_matcher()
    for token_id in tokens:
        if matcher.is_complete or token_id not in allowed_ids(matcher, size) or matcher.advance(token_id) is not None:
            return False
    return not matcher.is_complete


def test_several_matchers_of_two_backends_fill_their_drafts_in_one_call(compiler, vocabulary):
    pytest.importorskip("xgrammar")
    grammars = [
        compiler.start(Constraint(kind="regex", source="(ab|cd)+", backend=backend)).result()
        for backend in ("llguidance", "xgrammar", "llguidance")
    ]
    drafts = [DraftedTokens([97, 98, 99], [-1, 0, 1]), DraftedTokens(), DraftedTokens([120, 99], [-1, -1])]
    masks = fill_masks([grammar.new_matcher() for grammar in grammars], [[ENDING]] * 3, drafts)
    assert masks.is_known == [True, True, True, True, True, True, False, True]
    found = [bits(row, vocabulary.size) for row in masks.words]
    assert found[:3] == [{97, 99, 257}] * 3
    assert found[3:6] == [{98}, {97, 99, 257, ENDING}, {100}]
    assert found[7] == {100}


def test_forced_tokens_are_the_only_ones_that_masks_allow(grammar, vocabulary):
    rng = random.Random(5)
    num_forced = 0
    for _ in range(10):
        matcher, tokens = grammar.new_matcher(), ()
        while not matcher.is_complete and len(tokens) < 30:
            for index, token_id in enumerate(forced := tuple(matcher.forced_tokens())):
                mate = after(grammar, tokens + forced[:index])
                assert allowed_ids(mate, vocabulary.size, [ENDING]) == {token_id}
                num_forced += 1
            allowed = sorted(allowed_ids(matcher, vocabulary.size))
            tokens += (rng.choice(allowed),)
            assert matcher.advance(tokens[-1]) is None
    assert num_forced > 0 or "Xgrammar" in type(grammar.new_matcher()).__name__


def test_fitting_tokens_are_counted_and_the_matcher_stays_where_it_is(grammar, vocabulary):
    rng = random.Random(9)
    for _ in range(20):
        tokens, matcher = (), grammar.new_matcher()
        while not matcher.is_complete and len(tokens) < 20:
            tokens += (rng.choice(sorted(allowed_ids(matcher, vocabulary.size))),)
            matcher.advance(tokens[-1])
        begin = rng.randrange(len(tokens))
        matcher = after(grammar, tokens[:begin])
        before = allowed_ids(matcher, vocabulary.size)
        assert matcher.num_fitting(tokens[begin:]) == len(tokens) - begin
        assert matcher.num_fitting((*tokens[begin:], 7)) == len(tokens) - begin
        assert matcher.num_fitting((7, *tokens[begin:])) == 0
        assert allowed_ids(matcher, vocabulary.size) == before
        assert matcher.advance(tokens[begin]) is None


class Fragile:
    """A matcher that gets lost behind its first draft."""

    end_token_id = 300

    def __init__(self, matcher):
        self._matcher, self.source, self.is_complete = matcher, matcher.source, False
        self.state = matcher.state

    def narrow(self, words):
        pass

    def advance(self, token_id):
        return "it is too much"


def test_matcher_is_known_to_be_lost_when_it_fails_behind_a_draft(compiler):
    matcher = compiler.start(Constraint(kind="regex", source="(ab|cd)+")).result().new_matcher()
    masks = fill_masks([Fragile(matcher)], [[ENDING]], [DraftedTokens([97, 98], [-1, 0])])
    assert (masks.errors, masks.is_known, masks.is_broken) == ([None], [True, False, False], [True])


class Clock:
    """Says that every step took what it is told; knows whether the one who made it asked last: whether it fills masks."""

    def __init__(self, *costs):
        self.now, self.owner, self.is_callers = 0.0, threading.get_ident(), False
        self.costs = iter([part for cost in costs for part in (0.0, cost)])  # nothing at the beginning of a step

    def __call__(self):
        self.now += next(self.costs, 0.0)
        self.is_callers = threading.get_ident() == self.owner
        return self.now


def test_masks_are_filled_at_once_when_they_take_next_to_no_time(compiler):
    matcher = compiler.start(Constraint(kind="regex", source="(ab|c){1,4}")).result().new_matcher()
    clock = Clock(5e-5, 3e-5, 4e-3)
    filler = MaskFiller(clock)
    expected = fill_masks([matcher], [()]).words
    was_inline = []
    try:
        for _ in range(4):
            assert np.array_equal(filler.start([matcher], [()]).result().words, expected)
            was_inline.append(clock.is_callers)
        assert was_inline == [False, True, True, False], "a mask that took long is followed by others that may"
        num_steps = 0
        while not clock.is_callers:
            filler.start([matcher], [()]).result()
            num_steps += 1
        assert 3 < num_steps < 10
        drafts = [DraftedTokens(list(b"c" * 20), range(-1, 19))]
        filler.start([matcher], [()], drafts).result()
        assert not clock.is_callers
    finally:
        filler.close()


def test_masks_are_not_taken_for_cheap_when_other_threads_filled_them(compiler):
    matchers = [compiler.start(Constraint(kind="regex", source="(ab|c){1,4}")).result().new_matcher() for _ in range(3)]
    clock = Clock(0.0)
    filler = MaskFiller(clock)
    try:
        for count in (3, 1):
            filler.start(matchers[:count], [()] * count).result()
            assert not clock.is_callers
    finally:
        filler.close()
