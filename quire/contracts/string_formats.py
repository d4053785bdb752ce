"""Which formats of a JSON schema are enforced; all others are annotations, as the standard lets them be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

ENFORCED_FORMATS = frozenset(
    (
        "date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
        "uri", "iri", "uri-reference", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    )
)  # fmt: skip
_MAPS_OF_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("enum", "const", "default", "example", "examples"))


def enforces_format(schema: dict[str, Any]) -> bool:
    """Whether the format of a schema is enforced: one that is known, of what may be a string."""
    kinds = schema.get("type", "string")
    return schema["format"] in ENFORCED_FORMATS and "string" in ((kinds,) if isinstance(kinds, str) else kinds)


def find_annotations(schema: object) -> Iterator[str]:
    """Yield the paths of formats in a schema that are not enforced, such as properties.a.format."""
    waiting: list[tuple[str, object, bool]] = [("", schema, False)]
    while waiting:
        path, found, is_map = waiting.pop()
        if isinstance(found, list):
            waiting += [(f"{path}[{at}]", part, False) for at, part in enumerate(cast("list[object]", found))][::-1]
        if not isinstance(found, dict):
            continue
        fields = cast("dict[str, Any]", found)
        if not is_map and isinstance(fields.get("format"), str) and not enforces_format(fields):
            yield f"{path}.format".lstrip(".")
        waiting += [
            (f"{path}.{key}".lstrip("."), part, not is_map and key in _MAPS_OF_SCHEMAS)
            for key, part in fields.items()
            if is_map or key not in _VALUES
        ][::-1]
