"""Patterns of the quantisation config: as `re` matches them, and in bounded time whatever they say."""

import random
import re
import sys
import time

import pytest

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.quant import patterns
from quire.quant.config import read_quantization
from quire.quant.patterns import ModulePattern

pytest.importorskip("re2")
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
    "(?i)LM_Head",
    r"(?P<layer>\w+)\b",
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


HOSTILE = ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){20}$", ".*.*.*.*.*.*.*.*x", "(a*)*b", "((a?){20}){9}b", "(a|b)*a[ab]{20}c$"]


@pytest.mark.parametrize("text", HOSTILE)
def test_pattern_ends_at_once_when_backtracking_would_explode(text):
    begun = time.process_time()
    pattern = ModulePattern(text)
    assert not pattern.matches("a" * 500 + "!")
    for name in random_names(20):
        pattern.matches(name)
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "text, problem",
    [
        ("((a{100}){100}){100}", "repetition size"),
        (".*(a.{999}|b.{999}|[ab].{901})c$", "too large"),
        ("a{1001}", r"repetition size: \{1001.*counts above 1000"),
        ("a" * 2000, "2000 characters"),
        (r"(a)\1", r"escape sequence: \\1.*back references"),
        ("(?=a)b", r"\(\?=.*look-around"),
        ("^(?!x).*", r"\(\?!.*look-around"),
        ("a**", r"repetition operator: \*\*"),
        ("*a", "no argument"),
        ("(a", "missing"),
        ("a)", "unexpected"),
        ("[a", "missing"),
        ("[z-a]", "range: z-a"),
        ("a{2,1}", "repetition size"),
        (r"a\Z", r"escape sequence: \\Z"),
        ("a\\", "trailing"),
        ("\ud800" * 3 + "(", "missing"),
    ],
    ids=lambda value: ascii(value[:20]),
)
def test_pattern_is_refused_at_once_when_it_is_huge_or_unsupported(text, problem, capfd):
    begun = time.process_time()
    with pytest.raises(UnsupportedError, match=problem) as caught:
        ModulePattern(text)
    assert time.process_time() - begun < 1
    assert repr(text[:40])[1:-1] in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["a{,3}", "a{99999999999999}", "a{2,99999999999999}", "[[:alpha:]]+", "(a)" * 12 + r"\12"])
def test_pattern_is_refused_where_it_has_another_meaning_in_re2(text):
    with pytest.raises(UnsupportedError, match="another meaning"):
        ModulePattern(text)


@pytest.mark.parametrize(
    "text, name, is_match",
    [
        ("a$", "a\n", False),  # `re` matches before a line break at the end
        (r"\w$", "\u00e9", False),  # classes are those of ASCII
        (r"\d$", "\u0663", False),
        (r"a\s$", "a\v", False),
        (".$", "\u00e9", True),  # one character, not one byte
        ("(?i)\u00c9$", "\u00e9", True),
        ("a{1000}", "a" * 512, False),
        (".$", "\ud800", True),  # what JSON may contain
    ],
)
def test_pattern_matches_where_re2_differs_from_re_or_characters_are_not_ascii(text, name, is_match):
    assert ModulePattern(text).matches(name) is is_match


def random_names(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices("ab", k=500)) for _ in range(count)]


def _gptq(texts):
    values = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}
    return read_quantization({**values, "dynamic": {f"-:{text}": {} for text in texts}}, "config.json")


def _compressed(texts):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
    values = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    return read_quantization({**values, "ignore": [f"re:{text}" for text in texts]}, "config.json")


@pytest.mark.parametrize("read", [_gptq, _compressed])
def test_patterns_share_one_budget_so_that_many_are_refused_as_soon_as_one(read, monkeypatch):
    monkeypatch.setattr(patterns, "_MAX_WORK", 10_000_000)
    name = "a" * 500
    alone = read([".*a.{240}.{200}c$"])
    assert alone.find_scheme(name) is not None
    many = read([f".*a.{{240}}.{{{200 + index}}}c$" for index in range(12)])
    with pytest.raises(ModelFormatError, match="together too complex"):
        many.find_scheme(name)


def test_real_patterns_need_little_of_the_budget(monkeypatch):
    monkeypatch.setattr(patterns, "_MAX_WORK", patterns._MAX_WORK // 20)
    layers = "|".join(map(str, range(61)))
    pattern = ModulePattern(rf"(.*\.)?layers\.({layers})\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj$")
    for index in range(7000):  # as many characters as all names of 61 layers of 384 experts have, in fewer names
        assert pattern.matches(f"{'m' * 400}.layers.{index % 61}.mlp.experts.383.down_proj")


def test_long_module_name_is_refused_where_there_are_patterns():
    with pytest.raises(ModelFormatError, match="name of 513 characters"):
        ModulePattern("a").matches("a" * 513)
    assert ModulePattern("a").matches("a" * 512)


def test_simple_patterns_alone_are_matched_where_google_re2_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    written = ModulePattern(r"(.*\.)?model\.layers\.(0|1|17)\.mlp\.(gate|up)_proj$")
    assert written.matches("model.layers.17.mlp.up_proj")
    assert written.matches("language.model.layers.0.mlp.gate_proj")
    assert not written.matches("model.layers.2.mlp.up_proj")
    for text in ("(a+)+$", "a?" * 7 + "a" * 7, "(a|a)" * 7, ".*.*.*.*.*.*.*b", "(?!x)", "(?i)x"):
        with pytest.raises(UnsupportedError, match="needs the package google-re2"):
            ModulePattern(text)
