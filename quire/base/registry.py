"""A registry of named creators, filled at import and read when an object is created."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from quire.base.errors import UnsupportedError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to values; an unknown name is an error that lists the known ones."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under every name."""

        def enter(value: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self._noun} {name!r} is registered twice")
                self._entries[name] = value
            return value

        return enter

    def get(self, name: str) -> T:
        """Return the entry of `name`; raises UnsupportedError with the known names."""
        try:
            return self._entries[name]
        except KeyError:
            raise UnsupportedError(
                f"{self._noun} {name!r} is not supported; supported: {', '.join(sorted(self._entries))}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
