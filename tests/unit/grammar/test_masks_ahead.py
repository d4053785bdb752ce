"""Masks behind drafted tokens: those of a matcher that has taken these tokens in, whatever else was drafted."""

import json
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("llguidance")

from quire.contracts.constraint import Constraint
from quire.grammar import llguidance_backend
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.mask_filler import MaskFiller
from quire.grammar.masks import DraftedTokens, MaskCost, MaskFill
from quire.worker import grammar_masks
from tests.no_threads import no_threads
from tests.unit.grammar.byte_vocabulary import allowed_ids, filled, make_vocabulary

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


@pytest.mark.one_in(2)
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
        masks = filled(matcher, [ENDING], draft)
        assert masks.error is None
        assert not masks.is_broken
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


@pytest.mark.parametrize("refused", ["another", "quire-masks"])
def test_several_matchers_of_two_backends_fill_their_drafts_beside_each_other(compiler, vocabulary, refused):
    pytest.importorskip("xgrammar")
    grammars = [
        compiler.start(Constraint(kind="regex", source="(ab|cd)+", backend=backend)).result()
        for backend in ("llguidance", "xgrammar", "llguidance")
    ]
    drafts = [DraftedTokens([97, 98, 99], [-1, 0, 1]), DraftedTokens(), DraftedTokens([120, 99], [-1, -1])]
    fills = [MaskFill(one.new_matcher(), [ENDING], draft) for one, draft in zip(grammars, drafts, strict=True)]
    filler = MaskFiller()
    try:
        with no_threads(refused):
            filler.start(fills)
        assert filler.wait_for_all(fills, 60)
    finally:
        filler.close()
    assert [fill.is_known for fill in fills] == [[True] * 4, [True], [True, False, True]]
    found = [[bits(row, vocabulary.size) for row in fill.words] for fill in fills]
    assert found[0] == [{97, 99, 257}, {98}, {97, 99, 257, ENDING}, {100}]
    assert found[1] == [{97, 99, 257}]
    assert (found[2][0], found[2][2]) == ({97, 99, 257}, {100})


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


def test_matcher_is_not_asked_for_masks_of_tokens_that_it_forces(compiler):
    grammar = compiler.start(Constraint(kind="regex", source="x?forced[ab]")).result()
    matcher = after(grammar, b"x")
    forced = tuple(matcher.forced_tokens())
    assert forced[:4] == tuple(b"forc")
    for drafted, num_filled in ((forced, 1), (forced[:2], 0), ((*forced[:2], 99, *forced[3:]), 0), ((120,), 0)):
        masks = filled(matcher, [ENDING], DraftedTokens(drafted, range(-1, len(drafted) - 1)))
        assert (masks.error, masks.is_broken, masks.num_filled) == (None, False, num_filled)
        for row, is_known in enumerate(masks.is_known):
            assert is_known == (row == 0 or drafted[:row] == forced[:row])
            behind = (*b"x", *forced[:row])
            assert not is_known or bits(masks.words[row], 300) == allowed_ids(after(grammar, behind), 300, [ENDING])


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

    def restrict(self, words):
        pass

    def forced_tokens(self):
        return ()

    def advance(self, token_id):
        return "it is too much"


def test_matcher_is_known_to_be_lost_when_it_fails_behind_a_draft(compiler):
    matcher = compiler.start(Constraint(kind="regex", source="(ab|cd)+")).result().new_matcher()
    masks = filled(Fragile(matcher), [ENDING], DraftedTokens([97, 98], [-1, 0]))
    assert (masks.error, masks.is_known, masks.is_broken) == (None, [True, False, False], True)


def test_masks_are_the_same_when_an_output_gets_a_grammar_of_its_own(compiler, vocabulary, monkeypatch):
    """As it does where they are slow, lest others of the grammar wait for them."""
    grammar = compiler.start(Constraint(kind="json_schema", source=json.dumps(SCHEMA))).result()
    monkeypatch.setattr(llguidance_backend, "_SLOW_S", -1.0)
    rng = random.Random(7)
    matcher, tokens = grammar.new_matcher(), ()
    assert not matcher.state.is_alone
    while len(tokens) < 25 and not matcher.is_complete:
        if len(tokens) % 5 == 4:
            matcher = matcher.fork()
            assert not matcher.state.is_alone
        found = filled(matcher, (), DraftedTokens([97, 34], [-1, -1]))
        assert matcher.state.is_alone or found.num_filled == 0
        assert bits(found.words[0], vocabulary.size) == allowed_ids(after(grammar, tokens), vocabulary.size)
        tokens += (rng.choice(sorted(allowed_ids(matcher, vocabulary.size) - {257})),)
        assert matcher.advance(tokens[-1]) is None
    assert len(tokens) > 10


class Held:
    """A matcher, and the source of its masks, which come when the test lets them."""

    end_token_id = 300

    def __init__(self, mask_s=float("inf")):
        self.source, self.first_mask_s, self.may_go_on, self.is_filled = self, mask_s, threading.Event(), False

    def fill(self, matcher, words):
        assert self.may_go_on.wait(60)
        self.is_filled = True

    def restrict(self, words):
        pass


@pytest.fixture
def filler():
    filler = MaskFiller()
    yield filler
    filler.close()


def test_cheap_masks_are_filled_while_more_slow_ones_than_threads_are_not(filler):
    slow, cheap = [Held(1.0) for _ in range(20)], [Held(1e-5) for _ in range(3)]
    for matcher in cheap:
        matcher.may_go_on.set()
    fills = [MaskFill(matcher) for matcher in (*slow, *cheap)]
    filler.start(fills)
    assert filler.wait_for_all(fills[20:], 60)
    assert not any(fill.is_done for fill in fills[:20])
    for matcher in slow:
        matcher.may_go_on.set()
    assert filler.wait_for_all(fills, 60)


def test_those_behind_a_mask_that_is_slow_all_of_a_sudden_are_filled_without_it(filler):
    first, others = Held(1e-6), [Held(1e-5) for _ in range(3)]
    for matcher in others:
        matcher.may_go_on.set()
    fills = [MaskFill(matcher) for matcher in (first, *others)]
    filler.start(fills)
    filler.start_again(fills)
    assert filler.wait_for_all(fills[1:], 60)
    assert not fills[0].is_done
    first.may_go_on.set()
    assert filler.wait_for_all(fills, 60)


def test_masks_are_filled_at_once_when_they_take_next_to_no_time_and_nobody_else_waits(filler):
    matchers = [Held(1e-5) for _ in range(2)]
    for matcher in matchers:
        matcher.may_go_on.set()
    fill = MaskFill(matchers[0])
    filler.start([fill], is_alone=True)
    assert fill.is_done
    dear = MaskFill(matchers[1], cost=MaskCost(1e-3))
    filler.start([dear], is_alone=True)
    assert filler.wait_for_all([dear], 60)
    assert dear.cost.mask_s == 5e-4, "what a dear mask makes believe of those to come is forgotten by halves"


def test_a_mask_is_not_late_while_the_model_is_expected_to_run(monkeypatch):
    """The last step took 0.2 s, and its mask comes when a wait of that length begins; after the model no such wait is left."""
    monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(monotonic=lambda: 5.0))
    held = Held()

    class Filler(MaskFiller):
        def wait_for_all(self, fills, timeout_s):
            if timeout_s == 0.2:
                held.may_go_on.set()
                timeout_s = 60.0
            return super().wait_for_all(fills, timeout_s)

    sampling = SimpleNamespace(matcher=held, grammar_error=None, grammar_ending_ids=(), token_mask=None)
    row = SimpleNamespace(start=SimpleNamespace(sequence_id=7), sampling=sampling)
    owner = grammar_masks.GrammarMasks(Filler())
    try:
        owner.note_model_time(0.2)
        assert owner.start([row], {}, 2).wait(is_running=True) == frozenset()
        assert sampling.token_mask is not None
        held.may_go_on.clear()
        assert owner.start([row], {}, 2).wait() == {7}
        assert owner.model_s == 0.0
    finally:
        held.may_go_on.set()
        owner.close()


def test_late_masks_do_not_make_the_waits_for_others_longer(monkeypatch):
    """The model takes 5 ms; who waits for a mask that never comes, and then samples, has not measured the model."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def pass_by(_, timeout_s):
        clock.now += timeout_s
        return False

    filler = SimpleNamespace(wait_for_all=pass_by, start_again=lambda fills: None)
    row = SimpleNamespace(start=SimpleNamespace(sequence_id=7))
    owner = grammar_masks.GrammarMasks(filler)
    owner.note_model_time(0.005)
    for model_s in (0.0, 0.0, 0.5):
        fill = SimpleNamespace(is_done=False, is_slow=False, hurry=lambda: None)
        masks = grammar_masks.StepMasks(owner, [(row, fill)], set(), 3)
        assert masks.wait(is_running=True) == {7}
        clock.now += 0.001 + model_s
        masks.note_end()
        assert owner.model_s == pytest.approx(0.511) if model_s else owner.model_s == 0.005


def test_nothing_is_filled_for_an_output_that_has_ended(filler):
    matchers = [Held(1.0) for _ in range(3)]
    fills = [MaskFill(matcher) for matcher in matchers]
    for fill in fills:
        fill.drop()
    matchers.append(Held(1.0))
    fills.append(MaskFill(matchers[-1]))
    filler.start(fills)
    for matcher in matchers:
        matcher.may_go_on.set()
    assert filler.wait_for_all(fills[3:], 60)
    assert [matcher.is_filled for matcher in matchers] == [False, False, False, True]
