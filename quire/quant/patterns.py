"""Match module names against regular expressions from an untrusted checkpoint, in linear time: RE2 never backtracks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import ModuleType

from quire.base.errors import ModelFormatError, UnsupportedError

_MAX_LENGTH = 1024
_MAX_NAME = 512
_MAX_MEMORY = 1 << 18
"""Bytes of RE2 for one pattern: its program, and the states that it has found."""
_MAX_WORK = 5_000_000_000
"""Maximum number of characters matched, each times the size of its pattern's program: for real patterns a few dozen."""
_OTHER_MEANING = re.compile(r"\{(,|[0-9,]*[0-9]{5})|\[:|\\[1-9][0-9]")
"""What RE2 accepts with another meaning than Python's `re`, for which configs are written: it is refused."""

_CHOICES = re.compile(r"(?s)\\.|\(\?|\)?[*+{?]|\(")
_MAX_CHOICES = 6
"""Repeats and groups of a pattern that is matched without google-re2."""


class MatchingBudget:
    """A limit of the work of all patterns of one config, so that a large number of patterns is refused too."""

    def __init__(self) -> None:
        self._work = 0

    def spend(self, work: int, text: str) -> None:
        """Count the work of matching a name. Raises ModelFormatError above the limit."""
        self._work += work
        if self._work > _MAX_WORK:
            raise ModelFormatError(
                "the patterns of the quantisation config are together too complex to match the checkpoint's module names with; "
                f"they were given up at {text[:80]!r}: simplify them or name fewer"
            )


class ModulePattern:
    """A regular expression for module names, which matches a prefix of a name.

    The constructor raises UnsupportedError for what RE2 does not support (look-around, back references), for what it would
    match otherwise than Python's `re`, and for patterns that are too long or too large. Where google-re2 is not installed (a
    source tree that was not installed), it is raised for all but simple patterns.

    budget  shared with the other patterns of its config; None: its own
    """

    def __init__(self, text: str, budget: MatchingBudget | None = None) -> None:
        if len(text) > _MAX_LENGTH:
            raise UnsupportedError(
                f"a pattern of {len(text)} characters ({text[:40]!r}...) in the quantisation config is too long; "
                f"at most {_MAX_LENGTH} are read"
            )
        self.text = text
        self._budget = budget or MatchingBudget()
        if found := _OTHER_MEANING.search(text):
            raise _unsupported(text, f"{found[0]!r} has another meaning in RE2")
        re2 = _import_re2()
        self._match, self._size = _compile_simple(text) if re2 is None else _compile(re2, text)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a prefix of the name.

        Raises ModelFormatError if the name is too long, or the budget is exhausted.
        """
        if len(name) > _MAX_NAME:
            raise ModelFormatError(
                f"the checkpoint has a module name of {len(name)} characters ({name[:40]!r}...); at most {_MAX_NAME} are read "
                "where the quantisation config has patterns"
            )
        self._budget.spend(len(name) * self._size, self.text)
        return self._match(name) is not None


def _unsupported(text: str, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"the pattern {text[:80]!r} of the quantisation config is not supported: {problem}; supported is what RE2 supports, "
        "which excludes look-around, back references and counts above 1000"
    )


def _compile(re2: ModuleType, text: str) -> tuple[Callable[[str], object | None], int]:
    """Return what matches a pattern, and the size of its program."""
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = _MAX_MEMORY, False, True
    try:
        compiled = re2.compile(text.encode(errors="surrogatepass"), options)
    except re2.error as error:
        raise _unsupported(text, error.args[0].decode(errors="replace")) from error
    return lambda name: compiled.match(name.encode(errors="surrogatepass")), compiled.programsize


def _compile_simple(text: str) -> tuple[Callable[[str], object | None], int]:
    """Do so without google-re2, for patterns that `re` matches in little time: they have few choices, and no repeated group."""
    plain = text.replace("(?:", "(")
    choices = [found[0] for found in _CHOICES.finditer(plain) if found[0][0] != "\\"]
    if len(choices) > _MAX_CHOICES or any(choice in (")*", ")+", "){", "(?") for choice in choices):
        raise UnsupportedError(
            f"the pattern {text[:80]!r} of module names needs the package google-re2, which is not installed: "
            "pip install google-re2"
        )
    try:
        compiled = re.compile(text, re.ASCII)
    except re.error as error:
        raise _unsupported(text, str(error)) from error
    return compiled.match, _MAX_NAME


def _import_re2() -> ModuleType | None:
    try:
        return importlib.import_module("re2")
    except ImportError:
        return None
