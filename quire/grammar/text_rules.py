"""Free text as rules of xgrammar's EBNF: up to the first occurrence of its end, and without excluded texts.

xgrammar has formats for that, but allows special tokens, and bytes that are not characters, in them.
"""

from __future__ import annotations

from collections.abc import Sequence


def free_text_rules(end: str, excludes: Sequence[str]) -> str:
    """Return a grammar of the texts that end with `end` and contain it nowhere else; "": of all texts.

    excludes  texts that must not occur before

    A rule is a state: the longest prefix of one of the texts with which the text so far ends.
    """
    words = [word for word in (end, *excludes) if word]
    begun = sorted({word[:length] for word in words for length in range(len(word))} | {""}, key=lambda text: (len(text), text))
    numbers = {text: number for number, text in enumerate(begun)}
    rules = [f"t{number} ::= {' | '.join(_options(text, words, end, numbers))}" for text, number in numbers.items()]
    return "\n".join(["root ::= t0", *rules]) + "\n"


def _options(text: str, words: list[str], end: str, numbers: dict[str, int]) -> list[str]:
    """Return the continuations in the state of a text that ends with the prefix of a word."""
    following = sorted({word[len(part)] for part in _suffixes(text) for word in words if word.startswith(part)})
    options = [] if end else ['""']
    for character in following:
        longer = text + character
        found = {word for word in words if longer.endswith(word)}
        if end in found:
            options.append(_class_of(character))
        elif not found:
            begun = next(part for part in _suffixes(longer) if part in numbers)
            options.append(f"{_class_of(character)} t{numbers[begun]}")
    others = f"[^{''.join(map(_escape, following))}]" if following else r"[\U00000000-\U0010ffff]"
    return [*options, f"{others} t0"]


def _suffixes(text: str) -> list[str]:
    """Return the suffixes of a text, the longest first, including itself and ""."""
    return [text[start:] for start in range(len(text) + 1)]


def _class_of(character: str) -> str:
    return f"[{_escape(character)}]"


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"
