"""SamplingParams from a request's fields and the checkpoint's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quire.contracts.sampling_params import SamplingParams


def make_sampling(stated: Mapping[str, Any], recommended: Mapping[str, Any], **forced: Any) -> tuple[SamplingParams, bool]:
    """Return the parameters, and whether one choice is run and copied n times: at temperature 0 all choices are equal.

    stated       fields of SamplingParams; None means absent, except for max_tokens
    recommended  by the checkpoint, for absent fields
    forced       takes precedence over both
    Raises RequestError.
    """
    fields: dict[str, Any] = dict(recommended)
    fields.update((name, value) for name, value in stated.items() if value is not None or name == "max_tokens")
    fields.update(forced)
    num_sequences = max(fields.get("n") or 1, fields.get("best_of") or 1)
    if num_sequences == 1 or fields.get("temperature", 1.0) != 0:
        return _params(fields), False
    fields.update(n=1, best_of=None)
    return _params(fields), True


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    if fields.get("constraint") is not None:  # which may be long
        return SamplingParams(**fields)
    try:
        return _known_params(tuple((name, type(value), value) for name, value in fields.items()))
    except TypeError:  # there are lists or dicts among them
        return SamplingParams(**fields)


@lru_cache(maxsize=256)
def _known_params(fields: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    """Return the (frozen) parameters, cached by their fields, because checking them takes time."""
    return SamplingParams(**{name: value for name, _, value in fields})
