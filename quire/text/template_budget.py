"""WorkBudget: how much a chat template may still do, counted, never timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2.exceptions import TemplateError

# One unit is a loop step, a call, an item of a container, or this many characters of text.
CHARACTERS_PER_UNIT = 32
BASE_UNITS = 2_000_000
UNITS_PER_INPUT_UNIT = 50
MAX_TEXT_CHARACTERS = 16_000_000
MAX_INTEGER_BITS = 4096
MAX_LIST_ITEMS = 1_000_000

_CONTAINERS = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(TemplateError):
    """A template did more than it may."""


class WorkBudget:
    """The units of work left to one rendering.

    Containers are weighed as trees, so that a small graph that prints as a huge text is heavy; the weight of each is
    kept, which is right because the sandbox lets no container change.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        self._weights: dict[int, tuple[object, int]] = {}
        self._units = self._limit = BASE_UNITS
        self._limit += UNITS_PER_INPUT_UNIT * self.weigh(variables)
        self._units = self._limit

    def charge(self, units: int) -> None:
        """Use up units. Raises TemplateLimitError when none are left."""
        self._units -= units
        if self._units < 0:
            raise TemplateLimitError(
                f"the template does too much: more than {self._limit} steps (loop rounds, calls, or pieces of text)"
            )

    def charge_value(self, value: Any) -> Any:
        """Use up the weight of a value that is about to be read as a whole, and return it."""
        self.charge(self.weigh(value))
        return value

    def weigh(self, value: Any) -> int:
        """Return the number of units that reading the whole value takes."""
        if isinstance(value, str):
            return 1 + len(value) // CHARACTERS_PER_UNIT
        if not isinstance(value, _CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if not isinstance(value, dict):
            weight = 1 + self._sum_weights(value)
        else:
            weight = 1 + self._sum_weights(value.keys()) + self._sum_weights(value.values())
        self._weights[id(value)] = (value, weight)
        return weight

    def _sum_weights(self, values: Iterable[Any]) -> int:
        return sum([self.weigh(value) for value in values])

    def count(self, iterable: Any) -> Any:
        """Return an iterable of the same items that uses up one unit for each."""
        if isinstance(iterable, str | range | list | tuple | dict):
            self.charge(1 + len(iterable))
            return iterable
        self.charge(1)
        return self._count_lazily(iterable)

    def _count_lazily(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.charge(1)
            yield item

    def check_text(self, num_characters: int) -> None:
        """Use up the units of a text before it is made. Raises TemplateLimitError when it would be too long."""
        if num_characters > MAX_TEXT_CHARACTERS:
            raise TemplateLimitError(f"the template makes a text of more than {MAX_TEXT_CHARACTERS} characters")
        self.charge(max(num_characters, 0) // CHARACTERS_PER_UNIT)
