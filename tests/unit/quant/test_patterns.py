"""Patterns of the quantisation config: as `re` matches them, and in bounded time whatever they say."""

import random
import re
import time

import pytest

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant import compressed_config, config, patterns
from quire.quant.config import read_quantization
from quire.quant.patterns import MatchingBudget, ModulePattern

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
    budget = MatchingBudget()
    assert not ModulePattern(text, budget).matches("a" * 500 + "!")
    assert budget.num_visits < 300_000


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


def match_all(matches, names):
    for name in names:
        matches(name)


def random_names(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices("ab", k=500)) for _ in range(count)]


def test_pattern_is_refused_when_its_states_explode():
    # The twenty-first character from the end is an a: 2**20 deterministic states.
    budget = MatchingBudget()
    pattern = ModulePattern("(a|b)*a" + "[ab]" * 20 + "c$", budget)
    with pytest.raises(ModelFormatError, match="too complex"):
        match_all(pattern.matches, random_names(1000))
    assert budget.num_visits < 2_001_000


def _gptq(patterns):
    values = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}
    return read_quantization({**values, "dynamic": {f"-:{text}": {} for text in patterns}}, "config.json")


def _compressed(patterns):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
    values = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    return read_quantization({**values, "ignore": [f"re:{text}" for text in patterns]}, "config.json")


@pytest.mark.parametrize("read", [_gptq, _compressed])
def test_patterns_share_one_budget_so_that_many_hostile_ones_are_refused_as_soon_as_one(read, monkeypatch):
    budgets = []

    class Counted(MatchingBudget):
        def __init__(self):
            super().__init__()
            budgets.append(self)

    monkeypatch.setattr(config, "MatchingBudget", Counted)
    monkeypatch.setattr(compressed_config, "MatchingBudget", Counted)
    found = read([f".*a.{{240}}.{{{200 + index}}}c$" for index in range(12)])
    with pytest.raises(ModelFormatError, match="together too complex"):
        match_all(found.find_scheme, random_names(18))
    assert len(budgets) == 1
    assert budgets[0].num_visits < 2_001_000


def test_real_patterns_need_little_of_the_budget():
    budget = MatchingBudget()
    layers = "|".join(map(str, range(61)))
    texts = [*PATTERNS, rf"(.*\.)?layers\.({layers})\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj$"]
    compiled = [ModulePattern(text, budget) for text in texts]
    for layer in range(61):
        for expert in range(40):
            for pattern in compiled:
                pattern.matches(f"model.layers.{layer}.mlp.experts.{expert}.down_proj")
    assert budget.num_visits < 50_000


def test_walking_over_known_states_is_counted_too(monkeypatch):
    monkeypatch.setattr(patterns, "_MAX_CHARACTERS", 1000)
    pattern = ModulePattern(".*b")
    with pytest.raises(ModelFormatError, match="too complex"):
        match_all(pattern.matches, ["a" * 50] * 30)


def test_long_module_name_is_refused_where_there_are_patterns():
    with pytest.raises(ModelFormatError, match="name of 513 characters"):
        ModulePattern("a").matches("a" * 513)
    assert ModulePattern("a").matches("a" * 512)
