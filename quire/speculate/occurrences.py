"""OccurrenceIndex: where the last tokens of a sequence stood before."""

from __future__ import annotations

from collections.abc import Sequence


class OccurrenceIndex:
    """The places of every run of `width` tokens in a text that only grows."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = width - 1

    def extend(self, text: Sequence[int]) -> None:
        """Take in what `text` has gained since the last call. The run that ends it is left out until something follows it."""
        width, places = self._width, self._places
        for end in range(self._num_indexed + 1, len(text)):
            key = tuple(text[end - width : end])
            known = places.get(key)
            if known is None:
                places[key] = [end]
            else:
                known.append(end)
        self._num_indexed = max(self._num_indexed, len(text) - 1)

    def find(self, context: Sequence[int], text: Sequence[int], max_match: int, max_places: int) -> tuple[int, list[int]]:
        """Return the length of the longest end of `context` that stands in `text`, and where it ends there, the latest first.

        max_match   tokens compared at most
        max_places  the latest places looked at; with none of `width` tokens at least, (0, [])
        """
        width = self._width
        known = self._places.get(tuple(context[-width:])) if len(context) >= width else None
        if known is None:
            return 0, []
        longest = 0
        found: list[int] = []
        limit = min(max_match, len(context))
        for end in known[: -max_places - 1 : -1]:
            length = width
            while length < limit and length < end and text[end - length - 1] == context[-length - 1]:
                length += 1
            if length > longest:
                longest, found = length, [end]
            elif length == longest:
                found.append(end)
        return longest, found
