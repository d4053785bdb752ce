"""Old names of options: accepted for one release, with a warning."""

from __future__ import annotations

import warnings

from quire.base.errors import ConfigError


def take_old_name(config: object, old: str, value: object, new: str, prefix: str = "") -> None:
    """Set the field `new` of a frozen dataclass to the value of its old name, and warn; None: the old name was not used.

    For __post_init__. Raises ConfigError if the new name was given too, with another value than its default.
    """
    if value is None:
        return
    default = type(config).__dataclass_fields__[new].default  # type: ignore[attr-defined]
    given = getattr(config, new)
    if given != default and given != value:
        raise ConfigError(
            f"{prefix}{old} is the old name of {new}, and both are given, {value!r} and {given!r}; give {new} only"
        )
    # The callers are __post_init__ and the generated __init__.
    warnings.warn(
        f"{prefix}{old} is deprecated, use {new}; the old name ends with the next release", FutureWarning, stacklevel=4
    )
    object.__setattr__(config, new, value)
