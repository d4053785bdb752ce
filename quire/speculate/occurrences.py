"""OccurrenceIndex: where the last tokens of a sequence stood before."""

from __future__ import annotations

from collections.abc import Sequence


class OccurrenceIndex:
    """The places of every run of `width` tokens in a text that grows at its end, and may be cut at its beginning."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = width - 1
        self._num_cut = 0  # places count from the beginning that the text had at first

    def extend(self, text: Sequence[int]) -> None:
        """Take in what `text` has gained since the last call. The run that ends it is left out until something follows it."""
        width, places, cut = self._width, self._places, self._num_cut
        for end in range(self._num_indexed + 1, cut + len(text)):
            key = tuple(text[end - cut - width : end - cut])
            known = places.get(key)
            if known is None:
                places[key] = [end]
            else:
                known.append(end)
        self._num_indexed = max(self._num_indexed, cut + len(text) - 1)

    def cut(self, text: Sequence[int], count: int) -> None:
        """Forget the first `count` tokens of the text, which has more, and from now on comes without them."""
        width, places, cut = self._width, self._places, self._num_cut
        for end in range(cut + width, min(cut + count + width - 1, self._num_indexed) + 1):
            key = tuple(text[end - cut - width : end - cut])
            known = places[key]
            if len(known) == 1:
                del places[key]
            else:
                del known[0]  # the earliest one
        self._num_cut += count
        self._num_indexed = max(self._num_indexed, self._num_cut + width - 1)

    def find(self, context: Sequence[int], text: Sequence[int], max_match: int, max_places: int) -> tuple[int, list[int]]:
        """Return the length of the longest end of `context` that stands in `text`, and where it ends there, the latest first.

        max_match   tokens compared at most
        max_places  the latest places looked at; with none of `width` tokens at least, (0, [])
        """
        width, cut = self._width, self._num_cut
        known = self._places.get(tuple(context[-width:])) if len(context) >= width else None
        if known is None:
            return 0, []
        longest = 0
        found: list[int] = []
        limit = min(max_match, len(context))
        for place in known[: -max_places - 1 : -1]:
            end, length = place - cut, width
            while length < limit and length < end and text[end - length - 1] == context[-length - 1]:
                length += 1
            if length > longest:
                longest, found = length, [end]
            elif length == longest:
                found.append(end)
        return longest, found
