"""Refusal: why a value of a field is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.api.field_values import show_value

Refusal = Callable[[Any], str | None]
"""A function of a field's value (JSON as Python objects) that returns why it is refused, or None."""


def always(reason: str) -> Refusal:
    """Return a refusal of any value."""
    return lambda _value: reason


def unless(*allowed: object, reason: str, shows_value: bool = True) -> Refusal:
    """Return a refusal of any value except these; the reason has the value, unless it may hold secrets."""

    def refuse(value: Any) -> str | None:
        is_allowed = any(value is one or (value == one and type(value) is type(one)) for one in allowed)
        return None if is_allowed else f"{reason} (got {show_value(value)})" if shows_value else reason

    return refuse
