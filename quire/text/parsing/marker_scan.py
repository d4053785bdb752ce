"""MarkerScan: finds the first of several markers in a text, and possible beginnings of one at its end."""

from __future__ import annotations

import re


class MarkerScan:
    """Some markers to look for.

    triggers  matches the first character of any
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.markers = markers
        ordered = sorted(set(markers), key=len, reverse=True)
        self._longest = max(map(len, ordered), default=1)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        first = "".join(re.escape(character) for character in sorted({marker[0] for marker in ordered}))
        self.triggers = re.compile(f"[{first}]" if first else r"(?!)")
        self._prefixes = frozenset(marker[:length] for marker in ordered for length in range(1, len(marker)))

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first marker at or after text[start]."""
        return self._pattern.search(text, start)

    def sure_end(self, text: str, start: int) -> int:
        """Return the end of the text that cannot become part of a marker."""
        for candidate in self.triggers.finditer(text, max(start, len(text) - self._longest + 1)):
            if text[candidate.start() :] in self._prefixes:
                return candidate.start()
        return len(text)
