"""Refusal: why a value of a field is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Refusal = Callable[[Any], str | None]
"""A function of a field's value (JSON as Python objects) that returns why it is refused, or None."""


def always(reason: str) -> Refusal:
    """Return a refusal of any value."""
    return lambda _value: reason


def unless(*allowed: object, reason: str) -> Refusal:
    """Return a refusal of any value except these."""
    return lambda value: None if any(value is one or (value == one and type(value) is type(one)) for one in allowed) else reason
