"""Stop strings: finds the first one in a text that arrives in pieces."""

from __future__ import annotations

from quire.base.errors import RequestError


class StopStringScanner:
    """Passes text through until a stop string is complete in it.

    The stop string that is complete first wins, as if the text were checked after each character; of those complete at
    the same character the longest, which begins first. The result does not depend on how the text is split into pieces. The
    emitted text ends before the stop string, or after it with include_in_output. The time is linear in the text, for any stop
    strings.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        if not all(stops):
            raise RequestError(f"stop must not contain an empty string, got {stops!r}", "stop")
        # Longest first, so that the first one complete at a character is the one that begins first.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._num_matched = [0] * len(self._stops)
        self._include_in_output = include_in_output
        self._held = ""
        self._is_done = False

    def feed(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Return the text that may be emitted now, and the stop string if one is complete; nothing after a match.

        may_end  False: stop strings that are complete in this text are passed over; one may begin in it and end in later text

        What could still become a stop string is held back, except with include_in_output, where it stays anyway.
        """
        if self._is_done:
            return "", None
        found = self._scan(text, may_end)
        text, num_held = self._held + text, len(self._held)
        if found is not None:
            stop, end = found
            self._is_done, self._held = True, ""
            end += num_held
            return text[: end if self._include_in_output else end - len(stop)], stop
        if self._include_in_output or not self._stops:
            return text, None
        cut = len(text) - max(self._num_matched)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the remaining text, at the end of a text without a stop string."""
        text, self._held, self._is_done = self._held, "", True
        return text

    def _scan(self, text: str, may_end: bool) -> tuple[str, int] | None:
        """Advance the matchers (Knuth, Morris, Pratt); return the stop string and the end of it in `text`, exclusive."""
        num_matched = self._num_matched
        for position, character in enumerate(text):
            for index, stop in enumerate(self._stops):
                length = num_matched[index]
                while length and stop[length] != character:
                    length = self._borders[index][length - 1]
                length += stop[length] == character
                if length == len(stop):
                    if may_end:
                        return stop, position + 1
                    length = self._borders[index][-1]
                num_matched[index] = length
        return None


def _border_lengths(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        length += stop[length] == stop[index]
        borders[index] = length
    return borders
