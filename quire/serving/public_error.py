"""show_error: the part of an internal exception that clients may see."""

from __future__ import annotations

import re

MAX_LENGTH = 300
_MAX_READ = 1000  # characters of a message; longer messages are not scanned

# Quoted values may be prompts; an apostrophe within a word is no quotation mark.
_QUOTED = re.compile(r"""(?<!\w)b?(['"`])(?:\\.|(?!\1(?!\w)).)*(?:\1|$)""", re.DOTALL)
# Long lists may be the tokens of a prompt; shapes are shorter.
_NUMBERS = re.compile(r"[\[(]\s*-?\d+(?:\s*,\s*-?\d+){8,}[^\])]*(?:[\])]|$)")
_KEY = re.compile(r"\b(?:sk|pk|key|token)-[\w-]{6,}|\b(?i:bearer|basic)\s+\S+|[\w+=-]{32,}")
_PATH = re.compile(r"(?<![\w/])(?:[A-Za-z]:[\\/]|~?\.{0,2}/)[^\s,;:)\]]+|(?<![\w/])[\w.-]+(?:/[\w.-]+)+\.\w+")


def show_error(text: str) -> str:
    """Return a description of an exception, "Type: message", as one line of at most MAX_LENGTH characters.

    Paths, quoted values, long lists of numbers, and text that looks like a key are removed, since they may belong
    to another client's request. Of a traceback the last line is kept. The log has the full text.
    """
    text = text.strip()
    if text.startswith("Traceback"):
        text = text.rpartition("\n")[2]
    text = _QUOTED.sub("'...'", text[:_MAX_READ])
    text = next((line for line in text.splitlines() if line.strip()), "")
    for found, instead in ((_NUMBERS, "[...]"), (_PATH, "<path>"), (_KEY, "...")):
        text = found.sub(instead, text)
    text = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}..."
