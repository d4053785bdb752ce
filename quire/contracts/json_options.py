"""Options that are objects, given as JSON or as a dict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from quire.base.errors import ConfigError
from quire.base.suggestions import with_guesses


def parse_object(name: str, value: object, contents: str, hint: str = "") -> dict[str, Any]:
    """Return the object that value, a dict or JSON of an object, holds.

    name      the option that has the value, for messages
    contents  what the object holds, for messages
    hint      added to the message about a value that is not JSON

    Raises ConfigError if value is not an object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON ({error}), got {value!r}{hint}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object with {contents}, got {value!r}")
    return cast("dict[str, Any]", value)


def check_keys(name: str, options: dict[str, Any], known: Sequence[str], old_names: Sequence[str] = ()) -> None:
    """Raise ConfigError if options have a key that is neither one of the known nor of the old names."""
    unknown = sorted(str(key) for key in options if key not in known and key not in old_names)
    if unknown:
        raise ConfigError(f"{name} has no option {with_guesses(unknown, known)}; the options are {', '.join(known)}")
