"""Choices: the tree that Medusa heads draft, as a list of paths (`medusa_choices`)."""

from __future__ import annotations

from typing import Any, cast

from quire.base.errors import ConfigError, QuireError

Choices = tuple[tuple[int, ...], ...]
"""Paths, each after its beginning: (2, 0) is the most likely token of head 2 after the third most likely one of head 1."""

_MAX_RANK = 64


def read_choices(value: object, where: str, most: int, error: type[QuireError] = ConfigError) -> Choices:
    """Return the paths of a list of lists in their order, but each after its beginning. Raises `error`.

    where  what the list stands in
    most   paths that there may be
    """
    given = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    paths = [tuple(cast("list[Any]", path)) for path in given if isinstance(path, list | tuple)]
    if len(paths) < len(given) or not all(path and all(map(_is_rank, path)) for path in paths):
        raise error(
            f"{where}: medusa_choices must be a list of paths, each a list of ranks from 0 to {_MAX_RANK - 1}, one per head, "
            f"such as [[0], [0, 0], [1]], got {value!r:.200}"
        )
    num_different = len(set(paths))
    if num_different < len(paths) or not 1 <= len(paths) <= most:
        raise error(f"{where}: medusa_choices must be 1 to {most} different paths, got {len(paths)}, {num_different} different")
    return _behind_beginnings(paths, where, error)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_RANK


def _behind_beginnings(paths: list[tuple[int, ...]], where: str, error: type[QuireError]) -> Choices:
    known, found = set(paths), dict[tuple[int, ...], None]()
    for path in paths:
        for length in range(1, len(path) + 1):
            if path[:length] not in known:
                raise error(
                    f"{where}: medusa_choices has {list(path)} but not {list(path[:length])}, with which it begins; add it"
                )
            found[path[:length]] = None
    return tuple(found)
