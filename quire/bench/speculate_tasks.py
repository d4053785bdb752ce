"""Prompts made of passages of a text, to be continued; those for quote, copy and edit already contain the expected output."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from quire.base.errors import ConfigError

_NUM_BEGUN = 8
"""Number of words of a passage that the prompt repeats, so that it is continued."""
_WORDS_PER_EDIT = 24


def continuing_prompts(text: str, count: int, num_words: int) -> tuple[str, ...]:
    """Return passages of the text, to be continued."""
    return tuple(" ".join(passage) for passage in _passages(text, count, num_words))


def quoting_prompts(text: str, count: int, num_words: int) -> tuple[str, ...]:
    """Return prompts for quoting: a passage of the text twice, followed by its beginning, to be continued."""
    return tuple(_join(passage, passage, _begun(passage)) for passage in _passages(text, count, num_words))


def copying_prompts(text: str, count: int, num_words: int) -> tuple[str, ...]:
    """Return prompts for copying: shuffled words of the text, so that only the prompt determines what comes next.

    The words are repeated twice, followed by their beginning.
    """
    prompts: list[str] = []
    for index, passage in enumerate(_passages(text, count, num_words)):
        words = list(passage)
        random.Random(index).shuffle(words)
        prompts.append(_join(words, words, _begun(words)))
    return tuple(prompts)


def editing_prompts(text: str, count: int, num_words: int) -> tuple[str, ...]:
    """Return prompts for editing: a passage, then the passage with some words replaced, followed by the beginning of that.

    The expected output is the edited passage, which the prompt contains, next to one that differs in a few words.
    """
    others = text.split()
    prompts: list[str] = []
    for index, passage in enumerate(_passages(text, count, num_words)):
        draw = random.Random(index)
        edited = list(passage)
        for place in draw.sample(range(num_words), max(1, num_words // _WORDS_PER_EDIT)):
            edited[place] = others[draw.randrange(len(others))]
        prompts.append(_join(passage, edited, _begun(edited)))
    return tuple(prompts)


TASKS: Mapping[str, Callable[[str, int, int], tuple[str, ...]]] = {
    "continue": continuing_prompts,
    "quote": quoting_prompts,
    "copy": copying_prompts,
    "edit": editing_prompts,
}
"""Name -> function (text, prompts, words of a passage) -> prompts. They raise ConfigError if the text has too few words."""


def count_passages(text: str, num_words: int) -> int:
    """Return the number of passages of num_words words in a text."""
    return len(text.split()) // max(1, num_words)


def _join(*parts: list[str]) -> str:
    return "\n\n".join(" ".join(words) for words in parts)


def _begun(words: list[str]) -> list[str]:
    return words[:_NUM_BEGUN]


def _passages(text: str, count: int, num_words: int) -> list[list[str]]:
    """Return the words of evenly spaced passages of the text."""
    words = text.split()
    if num_words < 1 or len(words) < count * num_words:
        raise ConfigError(f"the text has {len(words)} words, too few for {count} passages of {num_words}")
    return [words[first : first + num_words] for first in (index * len(words) // count for index in range(count))]
