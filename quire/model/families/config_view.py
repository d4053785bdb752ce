"""ConfigView: config.json as checked, typed values, with the defaults that its family's class has."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

from quire.base.errors import ModelFormatError, UnsupportedError
from quire.contracts.model_spec import DTYPE_BYTES, Dtype

T = TypeVar("T")


@cache
def class_defaults(model_type: str) -> Mapping[str, object]:
    """Return the defaults of absent keys of config.json, taken from transformers' config classes.

    An entry that is "like" another one has the defaults of that, and its own instead of them and in addition.
    """
    table = json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))
    own = dict(table[model_type])
    like = own.pop("like", None)
    return own if like is None else {**class_defaults(like), **own}


class ConfigView:
    """Reads keys of a config.json. Every method raises ModelFormatError with the key, the value and the allowed values.

    An absent key has the default of its family's class. A key that is null counts as absent, except in the methods
    `nullable_*`, which return None for it: for those keys null is a value ("no window") and absent another (4096).
    Methods that take several keys read the first that is present; they are names of the same value.
    """

    def __init__(self, model_type: str, values: Mapping[str, object], file: Path | str) -> None:
        self.model_type = model_type
        self._values = values
        self._defaults = class_defaults(model_type)
        self._file = file
        self._seen = {"model_type"}

    def renamed(self, names: Mapping[str, str]) -> ConfigView:
        """Return a view that has values of the file under further names: old name -> the name that is read."""
        values = {**self._values}
        for old, name in names.items():
            if old in values and values.get(name, values[old]) != values[old]:
                raise ModelFormatError(
                    f"{self._file}: {old} and {name} name one value but differ: {values[old]!r}, {values[name]!r}"
                )
            if old in values:
                values[name] = values.pop(old)
        view = ConfigView(self.model_type, values, self._file)
        view._seen = self._seen
        self._seen.update(names)
        return view

    def nested(self, key: str) -> ConfigView:
        """Return a view of a JSON object under a key, empty where it is null or absent; errors name both keys."""
        return ConfigView(self.model_type, self.table(key), f"{self._file}: {key}")

    def has(self, key: str) -> bool:
        """Return whether the key is in the file with a value other than null."""
        return self._values.get(key) is not None

    def unread_keys(self) -> list[str]:
        """Return the keys that no method has read, in the order of the file."""
        return [key for key in self._values if key not in self._seen]

    def error(self, key: str, got: object, allowed: str) -> ModelFormatError:
        """Return the error for a value that is not allowed."""
        return ModelFormatError(f"{self._file}: {key} must be {allowed}, got {got!r}")

    def refuse_other(self, key: str, supported: object) -> None:
        """Raise UnsupportedError for a value other than null and the one that is supported."""
        if self.raw(key) not in (None, supported):
            raise UnsupportedError(
                f"{self._file}: {key} {self.raw(key)!r} is not supported in a {self.model_type!r} model; "
                f"supported: {supported!r}"
            )

    def raw(self, *keys: str) -> object:
        """Return an unchecked value, None if it is null, or absent without a default."""
        self._seen.update(keys)
        present = [(key, self._values[key]) for key in keys if self._values.get(key) is not None]
        if any(value != present[0][1] for _, value in present[1:]):
            raise ModelFormatError(f"{self._file}: {' and '.join(k for k, _ in present)} name one value but differ: {present}")
        if present:
            return present[0][1]
        return next((self._defaults[key] for key in keys if key in self._defaults), None)

    def integer(self, *keys: str, minimum: int = 1) -> int:
        """Return an integer from `minimum` to 2**40."""
        allowed = f"an integer from {minimum} to 2**40"
        return self._check(keys, lambda v: type(v) is int and minimum <= v <= 2**40, allowed, int)

    def nullable_integer(self, *keys: str, minimum: int = 1) -> int | None:
        """Return an integer of at least `minimum`, or None where the file says null or the default is null."""
        return None if self._is_none(keys) else self.integer(*keys, minimum=minimum)

    def number(self, *keys: str, is_positive: bool = True) -> float:
        """Return a finite number, by default a positive one."""
        allowed = "a positive number" if is_positive else "a number"
        return float(self._check(keys, lambda v: is_number(v) and (v > 0 or not is_positive), allowed, float))

    def nullable_number(self, *keys: str) -> float | None:
        """Return a positive finite number, or None where the file says null or the default is null."""
        return None if self._is_none(keys) else self.number(*keys)

    def boolean(self, *keys: str) -> bool:
        """Return true or false."""
        return self._check(keys, lambda v: isinstance(v, bool), "true or false", bool)

    def string(self, *keys: str) -> str:
        """Return a string."""
        return self._check(keys, lambda v: isinstance(v, str), "a string", str)

    def table(self, key: str) -> dict[str, object]:
        """Return a JSON object, empty where it is null or absent."""
        if self.raw(key) is None:
            return {}
        return dict(self._check((key,), lambda v: isinstance(v, dict), "an object", dict))

    def integers(self, key: str) -> list[int]:
        """Return a list of integers from 0 to 2**40; a single integer counts as a list of one, null and absent as an empty
        list."""
        value = self.raw(key)
        value = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= 2**40 for item in value):
            raise self.error(key, self.raw(key), "an integer from 0 to 2**40 or a list of them")
        return value

    def strings(self, key: str) -> list[str] | None:
        """Return a list of strings, or None where it is null or absent."""
        if self.raw(key) is None:
            return None
        is_list = self._check((key,), lambda v: isinstance(v, list), "a list of strings", list)
        return self._check((key,), lambda _: all(isinstance(s, str) for s in is_list), "a list of strings", list)

    def dtype(self) -> Dtype:
        """Return the checkpoint's dtype; `dtype` takes precedence over `torch_dtype`; absent is float32."""
        key = "dtype" if self.has("dtype") else "torch_dtype"
        self._seen.update(("dtype", "torch_dtype"))
        name = self.string(key).removeprefix("torch.") if self.has(key) else "float32"
        if name not in DTYPE_BYTES:
            raise UnsupportedError(f"{self._file}: {key} {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
        return cast("Dtype", name)

    def _is_none(self, keys: tuple[str, ...]) -> bool:
        if self.raw(*keys) is None:
            return True
        return any(key in self._values for key in keys) and all(self._values.get(key) is None for key in keys)

    def _check(self, keys: tuple[str, ...], is_valid: Callable[[object], bool], allowed: str, _type: type[T]) -> T:
        value = self.raw(*keys)
        if not is_valid(value):
            key = next((key for key in keys if key in self._values), keys[0])
            raise self.error(key, value, allowed)
        return cast("T", value)


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number that a float can hold."""
    is_numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_numeric and -sys.float_info.max <= value <= sys.float_info.max
