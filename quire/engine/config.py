"""Turn keyword options into the engine's configuration."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from quire.base.errors import ConfigError
from quire.base.suggestions import with_guesses
from quire.contracts.config import EngineConfig


def make_config(**options: Any) -> EngineConfig:
    """Build an EngineConfig; an unknown option raises a ConfigError that lists the options."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = sorted(set(options) - {*known, "fit_structured_outputs"})  # an old name
    if unknown:
        raise ConfigError(f"unknown option {with_guesses(unknown, known)}; the options are {', '.join(known)}")
    if isinstance(options.get("model"), os.PathLike):
        options["model"] = os.fspath(options["model"])
    return EngineConfig(**options)
