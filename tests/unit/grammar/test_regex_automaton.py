"""Texts that an automaton of an expression completes are matched by it, and are as short as can be."""

import random
import re

import pytest

from quire.grammar.regex_automaton import Effort, automaton_of, shortest_completion


def complete(patterns, text, **lengths):
    return shortest_completion([automaton_of(pattern) for pattern in patterns], text, Effort(100_000), **lengths)


@pytest.mark.parametrize(
    ("pattern", "text", "length"),
    [
        (r"\d{5}", "", 5),
        (r"\d{5}", "ab123", 2),
        (r"b+c", "xb", 1),
        (r"b+c", "xbc", 0),
        (r"\.com$", "a.com", 0),
        (r"\.com$", "a.comb.c", 2),
        (r"^[a-z]*\d{3}$", "abc", 3),
        (r"^(?:ab|cde){2,3}$", "ab", 2),
        (r"^a$|^bcd$", "b", 2),
        (r"^\w+@\w+\.(?:com|org)$", "me", 6),
        (r"(?i)^SCORE-\d$", "sc", 5),
        (r"^$", "", 0),
        ("^[^a-z]{2}", "", 2),
        (r"^\\\\\w+$", "", 3),
        ("^(a|ab)(c|bcd)$", "a", 1),
    ],
)
def test_completion_matches_and_is_shortest(pattern, text, length):
    found = complete([pattern], text)
    assert found is not None
    assert re.search(pattern, text + found)
    assert len(found) == length


@pytest.mark.parametrize(("pattern", "text"), [("^abc$", "b"), ("^ab$", "abc"), ("a^b", ""), ("^[0-9]+$", "1a")])
def test_no_completion_is_found_when_no_text_that_begins_so_matches(pattern, text):
    assert complete([pattern], text) is None


def test_completion_satisfies_several_expressions_and_lengths_at_once():
    patterns = [r"\d{2}", "[A-Z]", "^[a-zA-Z0-9]+x$"]
    found = complete(patterns, "q", least=7, most=9)
    assert found is not None
    assert all(re.search(pattern, "q" + found) for pattern in patterns)
    assert len(found) == 6
    assert complete(patterns, "q", most=4) is None


@pytest.mark.parametrize("pattern", [r"a(?=b)", r"(a)\1", r"\bx", "(", "a{3000}", "(?x)a b", "[z-a]", "*a"])
def test_expression_has_no_automaton_when_it_cannot_be_followed(pattern):
    assert automaton_of(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "names", "is_within"),
    [
        ("^score$", {"score"}, True),
        ("^score$", {"other"}, False),
        ("^(a|b)$", {"a", "b", "c"}, True),
        ("^(a|b)$", {"a"}, False),
        ("^x[0-2]$", {"x0", "x1", "x2"}, True),
        ("^x[0-3]$", {"x0", "x1", "x2"}, False),
        ("score", {"score"}, False),
        ("^a*$", {"", "a", "aa"}, False),
        (r"^\p{L}$", {"a"}, False),
        ("(?i)^ab$", {"ab", "Ab", "aB", "AB"}, True),
        ("a^b", set(), True),
    ],
)
def test_language_is_within_names_only_when_it_has_no_other_text(pattern, names, is_within):
    assert automaton_of(pattern).is_within(names) is is_within


def test_automaton_agrees_with_python_on_random_texts():
    rng = random.Random(3)
    atoms = ["a", "b", "[ab]", "[^a]", ".", "(?:a|bc)", "c"]
    for _ in range(300):
        parts = [rng.choice(atoms) + rng.choice(["", "", "*", "+?", "?", "{2}", "{1,2}"]) for _ in range(rng.randint(1, 4))]
        pattern = (
            rng.choice(["", "^"])
            + rng.choice(["", "b|"]).join(["".join(parts[:2]), "".join(parts[2:])])
            + rng.choice(["", "$"])
        )
        automaton = automaton_of(pattern)
        for _ in range(20):
            text = "".join(rng.choice("abc") for _ in range(rng.randint(0, 6)))
            assert (automaton.distance(automaton.read(text)) == 0) == bool(re.search(pattern, text)), (pattern, text)
            found = complete([pattern], text)
            if found is not None:
                assert re.search(pattern, text + found), (pattern, text, found)
