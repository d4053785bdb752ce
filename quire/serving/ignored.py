"""Reports unknown fields of a body: as a header, or as a list in a line of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

IGNORED_HEADER = "x-quire-ignored-params"
MAX_HEADER_LENGTH = 500


def header_of(paths: Iterable[str]) -> str:
    """Return the value of the header: as many paths as fit, then "..." if there are more."""
    shown, length = list[str](), 0
    for path in paths:
        quoted = quote(path, safe=".[]")
        length += len(quoted) + 1
        if length > MAX_HEADER_LENGTH:
            shown.append("...")
            break
        shown.append(quoted)
    return ",".join(shown)
