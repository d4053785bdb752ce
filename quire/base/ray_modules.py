"""The modules of Ray, which is imported only where it is used."""

from __future__ import annotations

import importlib
from typing import Any

from quire.base.errors import UnsupportedError


def import_ray(user: str, *names: str) -> tuple[Any, ...]:
    """Return modules of Ray by their names. Raises UnsupportedError, which says what the user needs, if one is missing."""
    try:
        return tuple(importlib.import_module(name) for name in names)
    except ModuleNotFoundError as error:
        raise lacks_package(user, error) from None


def lacks_package(user: str, error: ModuleNotFoundError) -> UnsupportedError:
    """Return the error for a package of the extra that is not installed."""
    return UnsupportedError(f"{user} needs the package {error.name}, which is not installed: pip install 'quire[ray]'")
