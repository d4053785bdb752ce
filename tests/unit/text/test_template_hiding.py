"""What is looked for a piece at a time is found as in one go."""

import random
import re

import pytest

from quire.text import template_hiding
from quire.text.template_hiding import RenderedChat, SpellingHider, matches


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(template_hiding, "_PIECE_CHARACTERS", 5)


@pytest.mark.parametrize("seed", range(40))
def test_matches_are_those_of_the_whole_text_when_pieces_cut_through_them(seed):
    rng = random.Random(seed)
    spellings = sorted({"".join(rng.choices("<|a", k=rng.randint(1, 9))) for _ in range(6)}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, spellings)))
    text = "".join(rng.choices("<|ab", k=400))
    start, end = rng.randrange(200), rng.randrange(200, 420)
    found = [match.span() for match in matches(pattern, len(spellings[0]), text, start, end)]
    assert found == [match.span() for match in pattern.finditer(text, start, end)]


def test_spellings_are_hidden_and_shown_again_when_they_lie_across_pieces():
    hider = SpellingHider(["<|end|>", "<|e"])
    text = "ab<|end|><|end|>c<|en<|e|>\U00100000 <|end"
    (message,), tools = hider.hide([{"role": "user", "content": text}], [{"name": text}])
    assert "<|e" not in message["content"] + tools[0]["name"]
    shown = hider.show(message["content"])
    spans = tuple(match.span() for match in re.finditer(r"<\|end\|>|<\|e", text))
    assert shown == RenderedChat(text, spans)


def test_marks_are_none_of_the_texts_when_names_and_values_have_them():
    hider = SpellingHider(["x"])
    used = ["\U00100000", "\U00100001", "\U00100002"]
    (message,), tools = hider.hide([{"role": "user", "content": used[0] + "x"}], {used[1]: [used[2]]})
    assert message["content"][0] == used[0]
    assert not set(message["content"][1:]) & set(used)
    assert tools == {used[1]: [used[2]]}
