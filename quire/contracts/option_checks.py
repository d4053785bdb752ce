"""Checks that several groups of options share."""

from __future__ import annotations

from quire.base.errors import ConfigError


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ConfigError, which says what an option may be and what was given, unless a condition holds."""
    if not condition:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def is_int(value: object, low: int) -> bool:
    """Return whether a value is an integer, not a bool, and at least `low`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """Raise ConfigError if the tokens of a step are fewer than the sequences that decode in it."""
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), so that "
            "every running sequence can decode in a step"
        )
