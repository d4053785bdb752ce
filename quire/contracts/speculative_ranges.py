"""Ranges of numbers in a speculative_config."""

from __future__ import annotations

from typing import cast

from quire.base.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
LOOKUP = (2, 8)
"""Tokens that ngram compares, at least and at most."""


def check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"speculative_config: {name} must be an integer from {low} to {high}, got {value!r}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= cast("float", value) <= high:
        raise ConfigError(f"speculative_config: {name} must be a number from {low:g} to {high:g}, got {value!r}")
