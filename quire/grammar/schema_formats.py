"""Formats of strings that llguidance takes too wide: days that no month has, and the sixtieth second of any minute."""

from __future__ import annotations

from typing import Any

_DAY = (
    r"[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
EXACT_FORMATS = {"date": _DAY, "time": _TIME, "date-time": rf"(?:{_DAY})T{_TIME}"}
"""Each no wider than RFC 3339; without the seconds that are inserted once in years."""


def narrow_format(schema: dict[str, Any]) -> None:
    """Put a pattern that says what the format does beside it, if it is one of these."""
    form = EXACT_FORMATS.get(str(schema.get("format")))
    if form is None:
        return
    exact: dict[str, Any] = {"pattern": f"^(?:{form})$"}
    if schema.keys() & {"pattern", "allOf"}:
        schema["allOf"] = [*schema.get("allOf", ()), exact]
    else:
        schema.update(exact)
