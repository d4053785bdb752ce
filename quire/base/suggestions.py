"""Suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def with_guesses(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Return the unknown names, separated by commas, followed by similar known names, if there are any."""
    from difflib import get_close_matches  # takes a moment, and is seldom needed

    names = list(known)
    close = [guess for name in unknown for guess in get_close_matches(name, names, 2, 0.6) or _longer(name, names)]
    return ", ".join(unknown) + did_you_mean(close)


def did_you_mean(close: Iterable[str]) -> str:
    """Return a suffix for unknown names that lists similar known ones, each once; "" for none."""
    found = ", ".join(dict.fromkeys(close))
    return f" (did you mean {found}?)" if found else ""


def _longer(name: str, known: Sequence[str]) -> list[str]:
    """Return the known names that begin with `name`."""
    return [one for one in known if len(name) > 2 and one.startswith(name)][:2]
