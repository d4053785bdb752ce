"""GrammarError: why a constraint cannot be compiled."""

from __future__ import annotations

import re

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint

_OWN_SCHEMA = re.compile(r"(?:.*?/tags/(\d+)/content|.*?)/json_schema(/.*)?", re.DOTALL)
"""A pointer into a schema within a structural tag: the number of its tag, and the pointer within the schema."""


class GrammarError(Exception):
    """A constraint is invalid, not supported or too complex; independent of the request that it came from.

    pointer  JSON pointer to the keyword at fault, where it is known
    """

    def __init__(self, message: str, pointer: str | None = None) -> None:
        super().__init__(message)
        self.pointer = pointer

    def for_request(self, constraint: Constraint) -> RequestError:
        """Return what the request of a constraint is told."""
        where = self._place(constraint)
        return RequestError(f"{constraint.param}: {self}{where and f' (at {where})'}", constraint.param)

    def _place(self, constraint: Constraint) -> str:
        """Return where the fault is in what the client has sent."""
        if self.pointer is None:
            return ""
        found = _OWN_SCHEMA.fullmatch(self.pointer) if constraint.schema_names else None
        if found is None:
            return self.pointer or "the root"
        tag, pointer = found.groups()
        name = constraint.schema_names[int(tag)] if tag is not None else ""
        return f"{name} {pointer or ('' if name else 'the root')}".strip()


def escape_pointer(key: str) -> str:
    """Return a key as one part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
