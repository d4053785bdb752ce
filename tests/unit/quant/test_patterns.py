"""Patterns of the quantisation config: as `re` matches them, and in bounded time whatever they say."""

import random
import re
import time

import pytest

from quire.base.errors import UnsupportedError
from quire.quant.patterns import ModulePattern

NAMES = [
    "",
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.17.mlp.gate",
    "model.layers.18.mlp.gate_proj",
    "model.layers.3.mlp.experts.101.down_proj",
    "vision_tower.blocks.1.fc1",
    "aaaa",
    "ab",
    "abab!",
    "x-y]z",
]
PATTERNS = [
    ".*lm_head",
    "lm_head",
    "^lm_head$",
    ".*mlp.gate$",
    r".*\.(?:17|18)\..*",
    r"model\.layers\.(?:[0-9]|1[0-7])\..*",
    r".*self_attn\.(q|k|v|o)_proj$",
    r"vision_tower.*",
    r"[^.]+\.[a-z_]{6}\.\d+",
    r"(ab){1,2}!?$",
    r"(ab){2}",
    r"a{2,}$",
    r"a{,3}$",
    r"",
    r"$",
    r"a|b|",
    r"x\-y[\]]z",
    r"[]x-]+",
    r".*?proj",
    r"\w+\.\w+\.\d{1,3}\.\S+$",
    r"(a+)+$",
    r"(?:a|ab)(?:c|b)*!?",
    r"(^a|b)b",
]


@pytest.mark.parametrize("text", PATTERNS)
def test_pattern_matches_what_re_matches(text):
    pattern = ModulePattern(text)
    for name in NAMES * 2:
        assert pattern.matches(name) == (re.match(text, name) is not None), (text, name)


def test_random_patterns_match_what_re_matches():
    rng = random.Random(0)

    def pattern(depth):
        kind = rng.randrange(7 if depth else 3)
        if kind < 3:
            return rng.choice(["a", "b", ".", "[ab]", "[^a]", "c"])
        if kind == 3:
            return f"({pattern(depth - 1)}|{pattern(depth - 1)})"
        if kind == 4:
            return f"(?:{pattern(depth - 1)}){rng.choice(['*', '+', '?', '{1,2}', '{2}', '{0,}'])}"
        return pattern(depth - 1) + pattern(depth - 1)

    for _ in range(400):
        text = rng.choice(["", "^"]) + pattern(3) + rng.choice(["", "$"])
        compiled = ModulePattern(text)
        for _ in range(15):
            name = "".join(rng.choices("abc", k=rng.randrange(7)))
            assert compiled.matches(name) == (re.match(text, name) is not None), (text, name)


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){20}$", ".*.*.*.*.*.*.*.*x", "(a*)*b", "((a?){20}){9}b"]
)
def test_pattern_ends_at_once_when_backtracking_would_explode(text):
    begun = time.process_time()
    assert not ModulePattern(text).matches("a" * 5000 + "!")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    "text, problem",
    [
        ("((a{100}){100}){100}", "too large"),
        ("a{300}", "count"),
        ("a{99999999999999}", "count"),
        ("a" * 2000, "2000 characters"),
        ("(" * 500 + ")" * 500, "nested deeper"),
        (r"(a)\1", r"escape '\\1'"),
        ("(?=a)b", "look-around"),
        ("^(?!x).*", "look-around"),
        ("(?i)a", "flags"),
        ("(?P<n>a)", "named groups"),
        ("a**", "repetition of a repetition"),
        ("*a", "nothing to repeat"),
        ("(a", "without"),
        ("a)", "without"),
        ("[a", "without"),
        ("[z-a]", "ascend"),
        ("a{2,1}", "ascending"),
        ("a{x}", "count"),
        (r"\b", "escape"),
        ("a\\", "escape"),
        ("^*", "repeated"),
    ],
    ids=lambda value: value[:20],
)
def test_pattern_is_refused_at_once_when_it_is_huge_or_unsupported(text, problem):
    begun = time.process_time()
    with pytest.raises(UnsupportedError, match=problem):
        ModulePattern(text)
    assert time.process_time() - begun < 1


def test_pattern_is_refused_when_its_states_explode():
    # The twelfth character from the end is an a: 2**12 deterministic states.
    rng = random.Random(1)
    pattern = ModulePattern("(a|b)*a" + "[ab]" * 20 + "c$")
    begun = time.process_time()
    with pytest.raises(UnsupportedError, match="too complex"):
        pattern.matches("".join(rng.choices("ab", k=100_000)))
    assert time.process_time() - begun < 5
