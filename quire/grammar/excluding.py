"""An expression of the texts in which a phrase is not found.

A text is read by the automaton that looks for the phrase (Knuth, Morris and Pratt, 1977), whose state is how much of the phrase
the text ends with. Its states are eliminated from the last one on: each is entered from below by one character alone.
"""

from __future__ import annotations

MAX_EXPRESSION_CHARACTERS = 2048


def excluding(phrase: str) -> str | None:
    """Return the expression, which is for the whole of a text; None where it would be long. The phrase must not be empty."""
    length = len(phrase)
    edges = [_edges(phrase, state) for state in range(length)]
    finish = ""  # how a text may end that has come to the state, without coming to a lower one
    for state in range(length - 1, 0, -1):
        loop = edges[state].pop(state, "")
        enter = _class(phrase[state - 1]) + (f"(?:{loop})*" if loop else "")
        for target, expression in edges[state].items():
            found = edges[state - 1].get(target)
            onward = f"{enter}(?:{expression})"
            edges[state - 1][target] = onward if found is None else f"{found}|{onward}"
        finish = f"(?:{enter}{finish})?"
        if len(finish) + sum(map(len, edges[state - 1].values())) > MAX_EXPRESSION_CHARACTERS:
            return None
    return f"(?:{edges[0][0]})*{finish}"


def _edges(phrase: str, state: int) -> dict[int, str]:
    """Return the characters that lead from a state to itself and to lower ones, by where they lead."""
    seen = phrase[:state]
    found: dict[int, str] = {}
    leading = {phrase[state]}
    for character in dict.fromkeys(phrase):
        target = _longest_beginning(phrase, seen + character)
        if 0 < target <= state:
            found[target] = _class(character)
            leading.add(character)
    return {0: f"[^{''.join(map(_escape, sorted(leading)))}]", **found}


def _longest_beginning(phrase: str, text: str) -> int:
    """Return how much of the phrase a text ends with."""
    return next(size for size in range(len(text), -1, -1) if phrase.startswith(text[len(text) - size :]))


def _class(character: str) -> str:
    return f"[{_escape(character)}]"


def _escape(character: str) -> str:
    return rf"\x{{{ord(character):X}}}"
