"""OccurrenceIndex: finds previous occurrences of the last tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


class OccurrenceIndex:
    """The places of every run of `width` tokens in a text that grows at its end and can be cut at its beginning.

    A place is the number of tokens up to the end of a run, counted from the original beginning of the text. The latest place of
    each run is stored, and for each place the previous one with the same run, as plain integers: the garbage collector does not
    have to traverse them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._mask = (1 << _TOKEN_BITS * width) - 1
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = []
        self._num_cut = 0
        self._run = 0  # the last tokens as one number

    def __len__(self) -> int:
        """The places in the text that were indexed and not cut."""
        return len(self._earlier)

    @property
    def num_runs(self) -> int:
        """How many different runs it has."""
        return len(self._latest)

    def extend(self, text: Sequence[int]) -> None:
        """Index what was appended to `text` since the last call, except the last run, which nothing follows yet."""
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
        """Remove the first `count` tokens from the index; `text` still has them, and more, but later calls pass it without."""
        width, latest = self._width, self._latest
        for first in range(min(count, len(self._earlier) - width + 1)):
            run = self._number(text[first : first + width])
            if latest.get(run) == self._num_cut + first + width:
                del latest[run]
        self._num_cut += count
        del self._earlier[:count]

    def find(self, context: Sequence[int], text: Sequence[int], max_match: int, max_places: int) -> tuple[int, list[int]]:
        """Return the length of the longest suffix of `context` that occurs in `text`, and the ends of its occurrences, latest
        first; (0, []) if no match has at least `width` tokens.

        max_match   maximum number of tokens compared
        max_places  maximum number of occurrences compared, the latest ones
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
