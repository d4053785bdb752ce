"""JsonFields: typed and checked access to a JSON object of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeGuard

from quire.base.errors import ModelFormatError, UnsupportedError


class JsonFields:
    """Reads keys of a JSON object; null counts as absent.

    where  the object's name in error messages

    Every method raises ModelFormatError with the key, the value and what is allowed.
    """

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, dict):
            raise ModelFormatError(f"{where} must be a JSON object, got {_short(values)}")
        self._values: Mapping[str, object] = values
        self.where = where

    def has(self, key: str) -> bool:
        """Return whether the key exists with a value other than null."""
        return self._values.get(key) is not None

    def raw(self, *keys: str) -> object:
        """Return the unchecked value of the first key that exists, or None."""
        return next((self._values[key] for key in keys if self.has(key)), None)

    def wrong(self, key: str, allowed: str) -> ModelFormatError:
        """Return the error for an invalid value."""
        return ModelFormatError(f"{self.where}: {key} must be {allowed}, got {_short(self.raw(key))}")

    def unsupported(self, key: str, supported: str) -> UnsupportedError:
        """Return the error for a value that is valid but not supported."""
        return UnsupportedError(
            f"{self.where}: {key} {_short(self.raw(key))} is not supported; supported: {supported}; "
            "take another version of the checkpoint, or the one that is not quantised"
        )

    def integer(self, *keys: str, minimum: int, maximum: int, default: int | None = None) -> int:
        """Return an integer from `minimum` to `maximum`; an absent one without a default is an error."""
        value = self.raw(*keys)
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            key = next((key for key in keys if self.has(key)), keys[0])
            raise self.wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, *keys: str, default: str) -> str:
        """Return a string."""
        value = self.raw(*keys)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(next(key for key in keys if self.has(key)), "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings, empty if it is absent."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return value

    def table(self, key: str) -> JsonFields:
        """Return a nested object, empty if it is absent."""
        value = self._values.get(key)
        return JsonFields({} if value is None else value, f"{self.where}.{key}")

    def items(self) -> list[tuple[str, object]]:
        """Return keys and values in the order of the file."""
        return list(self._values.items())

    def group_size(self, *keys: str) -> int | None:
        """Return the number of columns that share a scale, or None (stored as -1) if a whole row does."""
        value = self.raw(*keys)
        return None if value == -1 else self.integer(*keys, minimum=1, maximum=1 << 20)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number in the range of a float."""
    is_numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_numeric and -sys.float_info.max <= value <= sys.float_info.max
