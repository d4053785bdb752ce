"""GgufMetadata: type-checked access to the key-value pairs of a GGUF file."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from quire.base.errors import ModelFormatError

_INTEGERS = frozenset(("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"))
_FLOATS = frozenset(("f32", "f64"))
_SHOWN_CHARACTERS = 80

NO_TOKEN = 0xFFFFFFFF
"""The id that writers store for a token that does not exist."""


@dataclass(frozen=True, slots=True)
class GgufValue:
    """A value and its type in the file: "u32", "string", ..., or "u32[]" for an array, whose value is a sequence."""

    kind: str
    value: object

    def __str__(self) -> str:
        if self.kind.endswith("[]"):
            return f"{self.kind} of {len(cast('Sequence[object]', self.value))}"
        text = repr(self.value)
        return f"{self.kind} {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}"


def shortest_f32(value: float) -> float:
    """Return the number with the fewest digits that equals `value` when rounded to 32 bits."""
    if not math.isfinite(value):
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((number for number in candidates if struct.unpack("<f", struct.pack("<f", number))[0] == value), value)


class GgufMetadata:
    """Metadata by key. Every getter returns None if the key is absent and raises ModelFormatError for another type."""

    def __init__(self, path: Path, values: Mapping[str, GgufValue]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def raw(self, key: str) -> GgufValue | None:
        """Return a value of any type."""
        return self._values.get(key)

    def error(self, key: str, allowed: str) -> ModelFormatError:
        """Return the error for a value that is not allowed."""
        return ModelFormatError(f"{self.path}: {key} must be {allowed}, got {self._values.get(key, 'nothing')!s}")

    def string(self, key: str) -> str | None:
        """Return a string."""
        return cast("str | None", self._get(key, frozenset(("string",)), "a string"))

    def boolean(self, key: str) -> bool | None:
        """Return a boolean."""
        return cast("bool | None", self._get(key, frozenset(("bool",)), "a boolean"))

    def integer(self, key: str) -> int | None:
        """Return an integer of any width."""
        return cast("int | None", self._get(key, _INTEGERS, "an integer"))

    def number(self, key: str) -> float | None:
        """Return a number, stored as an integer or not; a 32-bit float is returned as its shortest decimal: 0.95."""
        value = cast("float | None", self._get(key, _INTEGERS | _FLOATS, "a number"))
        return value if value is None or self._values[key].kind != "f32" else shortest_f32(value)

    def strings(self, key: str) -> Sequence[str] | None:
        """Return an array of strings."""
        return cast("Sequence[str] | None", self._get(key, frozenset(("string[]",)), "an array of strings"))

    def array(self, key: str, *kinds: str) -> Sequence[int | float] | None:
        """Return an array of exactly one of the element types."""
        return cast(
            "Sequence[int | float] | None", self._get(key, frozenset(f"{k}[]" for k in kinds), f"an array of {kinds[0]}")
        )

    def _get(self, key: str, kinds: frozenset[str], allowed: str) -> object:
        found = self._values.get(key)
        if found is None:
            return None
        if found.kind not in kinds:
            raise self.error(key, allowed)
        return found.value
