"""OccurrenceIndex: where the last tokens of a sequence stood before."""

from __future__ import annotations

from collections.abc import Sequence

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


class OccurrenceIndex:
    """The places of every run of `width` tokens in a text that grows at its end, and may be cut at its beginning.

    A place is the number of tokens up to the end of a run, counted from where the text began at first. Of each run the latest
    one is noted, and of each place the one before it with the same run: numbers, through which the collector need not walk.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._mask = (1 << _TOKEN_BITS * width) - 1
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = []
        self._num_cut = 0
        self._run = 0  # the last tokens that were taken in, as one number

    def extend(self, text: Sequence[int]) -> None:
        """Take in what `text` has gained since the last call. The run that ends it is left out until something follows it."""
        latest, earlier, mask, run = self._latest, self._earlier, self._mask, self._run
        num_known = len(earlier)
        place = self._num_cut + num_known
        num_short = self._width - 1 - num_known
        for token_id in text[num_known : len(text) - 1]:
            place += 1
            run = (run << _TOKEN_BITS | token_id & _TOKEN_MASK) & mask
            if num_short > 0:
                num_short -= 1
                earlier.append(0)
            else:
                earlier.append(latest.get(run, 0))
                latest[run] = place
        self._run = run

    def cut(self, text: Sequence[int], count: int) -> None:
        """Forget the first `count` tokens of the text, which has more, and from now on comes without them."""
        width, latest = self._width, self._latest
        for first in range(min(count, len(self._earlier) - width + 1)):
            run = self._number(text[first : first + width])
            if latest.get(run) == self._num_cut + first + width:
                del latest[run]
        self._num_cut += count
        del self._earlier[:count]

    def find(self, context: Sequence[int], text: Sequence[int], max_match: int, max_places: int) -> tuple[int, list[int]]:
        """Return the length of the longest end of `context` that stands in `text`, and where it ends there, the latest first.

        max_match   tokens compared at most
        max_places  the latest places looked at; with none of `width` tokens at least, (0, [])
        """
        width, cut, earlier = self._width, self._num_cut, self._earlier
        longest = 0
        found: list[int] = []
        if len(context) < width:
            return longest, found
        limit = min(max_match, len(context))
        end = self._latest.get(self._number(context[-width:]), 0) - cut
        while end >= width and max_places > 0:
            max_places -= 1
            length = width
            while length < limit and length < end and text[end - length - 1] == context[-length - 1]:
                length += 1
            if length > longest:
                longest, found = length, [end]
            elif length == longest:
                found.append(end)
            end = earlier[end - 1] - cut
        return longest, found

    def _number(self, run: Sequence[int]) -> int:
        number = 0
        for token_id in run:
            number = number << _TOKEN_BITS | token_id & _TOKEN_MASK
        return number
