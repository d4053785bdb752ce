"""SpecialTokenGate: distinguishes markers that are special tokens from the same text in other tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# Decoded text has no lone surrogates, so one of them can represent a marker.
_FIRST_STAND_IN = 0xD800
_SURROGATE = re.compile("[\ud800-\udfff]")


class SpecialTokenGate:
    """Replaces every marker whose token has arrived by a single character, and leaves other text unchanged.

    marker_token_ids  marker -> id of its special token
    A marker in the text counts only while more of its tokens have arrived than were consumed: text may lag behind its
    tokens, never lead.
    """

    def __init__(self, marker_token_ids: Mapping[str, int]) -> None:
        self._marker_by_id = {token_id: marker for marker, token_id in marker_token_ids.items()}
        self._stand_ins = {marker: chr(_FIRST_STAND_IN + index) for index, marker in enumerate(marker_token_ids)}
        self._num_waiting = dict.fromkeys(marker_token_ids, 0)
        self._patterns: dict[tuple[str, ...], re.Pattern[str]] = {}
        self._restored = {ord(stand_in): marker for marker, stand_in in self._stand_ins.items()}
        self._held = ""

    def strict(self, markers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the form of markers where only special tokens count, if they are special tokens."""
        return tuple(self._stand_ins.get(marker, marker) for marker in markers)

    def lenient(self, markers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the forms of markers where their text counts too."""
        return (*markers, *(self._stand_ins[marker] for marker in markers if marker in self._stand_ins))

    def restore(self, text: str) -> str:
        """Return the text with the markers written out."""
        return text if text.isascii() or not self._stand_ins else text.translate(self._restored)

    def feed(self, text: str, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain, with the markers replaced."""
        if not self._stand_ins:
            return text
        for token_id in token_ids:
            marker = self._marker_by_id.get(token_id)
            if marker is not None:
                self._num_waiting[marker] += 1
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        text, self._held = self._held + text, ""
        replaced: list[str] = []
        start = 0
        while waiting := tuple(marker for marker, count in self._num_waiting.items() if count):
            found = self._pattern(waiting).search(text, start)
            if found is None:
                end = _sure_end(text, start, waiting)
                text, self._held = text[:end], text[end:]
                break
            marker = found.group()
            self._num_waiting[marker] -= 1
            replaced += [text[start : found.start()], self._stand_ins[marker]]
            start = found.end()
        return "".join([*replaced, text[start:]])

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _pattern(self, markers: tuple[str, ...]) -> re.Pattern[str]:
        found = self._patterns.get(markers)
        if found is None:
            ordered = sorted(markers, key=len, reverse=True)
            found = self._patterns[markers] = re.compile("|".join(map(re.escape, ordered)))
        return found


def _sure_end(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Return where the text ends that is not the beginning of a marker."""
    longest = max(map(len, markers))
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)
