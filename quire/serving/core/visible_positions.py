"""VisiblePositions: maps the visible parts of a text, as separated by a parser, to their tokens."""

from __future__ import annotations

from quire.serving.core.events import Position


class VisiblePositions:
    """Holds the positions of the tokens whose text a parser has read but not yet returned.

    The parser returns its input in order, without the markers. A token on the border of two parts belongs to
    the first of them that is visible.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, Position | None]] = []

    def add(self, text: str, position: Position | None) -> None:
        """Add one token and its text."""
        if text or position is not None:
            self._held.append((text, position))

    def take(self, text: str) -> list[Position]:
        """Return the positions of the tokens of a visible part of the text; earlier ones are dropped."""
        return self._consume(text)

    def drop(self, text: str) -> None:
        """Drop the tokens of an invisible part of the text, and earlier ones."""
        self._consume(text)

    def drop_all_but_last(self) -> None:
        """Drop all but the last token, the end of whose text may be visible."""
        del self._held[:-1]

    def _consume(self, text: str) -> list[Position]:
        """Remove the held tokens up to the end of `text`; return the positions of those that overlap it."""
        joined = "".join([held for held, _ in self._held])
        start = max(joined.find(text), 0)
        end = start + len(text)
        found: list[Position] = []
        textless: list[Position | None] = []  # beginnings of characters: they belong to the token that completes them
        at = 0
        for index, (held, position) in enumerate(self._held):
            begin, at = at, at + len(held)
            if begin >= end:
                self._held = self._held[index:]
                return found
            if not held:
                textless.append(position)
                continue
            if at > start:
                found += [known for known in (*textless, position) if known is not None]
            textless = []
            if at > end:
                self._held = [(held[end - begin :], None), *self._held[index + 1 :]]
                return found
        self._held = [("", position) for position in textless]
        return found
