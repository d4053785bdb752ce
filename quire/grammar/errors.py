"""GrammarError: why a constraint cannot be compiled."""

from __future__ import annotations

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint


class GrammarError(Exception):
    """A constraint is invalid, not supported or too complex; independent of the request that it came from.

    pointer  JSON pointer to the keyword at fault, where it is known
    """

    def __init__(self, message: str, pointer: str | None = None) -> None:
        super().__init__(message)
        self.pointer = pointer

    def for_request(self, constraint: Constraint) -> RequestError:
        """Return what the request of a constraint is told."""
        where = "" if self.pointer is None else f" (at {self.pointer or 'the root'})"
        return RequestError(f"{constraint.param}: {self}{where}", constraint.param)


def escape_pointer(key: str) -> str:
    """Return a key as one part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
