"""GrammarError: why a constraint cannot be compiled."""

from __future__ import annotations

import re

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint

_OWN_SCHEMA = re.compile(r"((?:(?!/json_schema).)*)/json_schema(/.*)?", re.DOTALL)
"""A pointer into a schema within a structural tag: the pointer to the schema, and the pointer within it."""
_TAG = re.compile(r".*/tags/(\d+)/content")


class GrammarError(Exception):
    """A constraint is invalid, not supported or too complex, whatever request it belongs to.

    pointer  JSON pointer to the invalid keyword, if known
    """

    def __init__(self, message: str, pointer: str | None = None) -> None:
        super().__init__(message)
        self.pointer = pointer

    def for_request(self, constraint: Constraint) -> RequestError:
        """Return the error for a request with this constraint."""
        where = self._place(constraint)
        return RequestError(f"{constraint.param}: {self}{where and f' (at {where})'}", constraint.param)

    def _place(self, constraint: Constraint) -> str:
        """Return the location of the error in what the client sent."""
        if self.pointer is None:
            return ""
        found = _OWN_SCHEMA.fullmatch(self.pointer) if constraint.schema_names else None
        if found is None:
            return self.pointer or "the root"
        before, pointer = found.groups()
        tag = _TAG.match(before)
        name = constraint.schema_names[int(tag.group(1))] if tag is not None else ""
        return f"{name} {pointer or ('' if name else 'the root')}".strip()


def escape_pointer(key: str) -> str:
    """Return a key as one component of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


class PassingError(GrammarError):
    """A constraint could not be compiled for a temporary reason: the next request with it tries again."""
