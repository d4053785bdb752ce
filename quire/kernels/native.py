"""Load the native CPU kernels, if they exist."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch  # noqa: F401  loaded before the extension, so that both use torch's copy of the OpenMP runtime

from quire.base.errors import ConfigError
from quire.base.logging import get_logger

_EXTENSION = "quire.kernels.cpu._native"

logger = get_logger(__name__)


@functools.cache
def load_native() -> ModuleType | None:
    """Return the extension with the native CPU kernels, or None if it was not built or QUIRE_NATIVE=0 disables it.

    QUIRE_CPU_ISA names an instruction set to use instead of the best one. The result is cached; callers that build a model with
    it log that.

    Raises ConfigError if one of the two variables has a value that is not allowed.
    """
    switch = os.environ.get("QUIRE_NATIVE", "1")
    if switch not in ("0", "1"):
        raise ConfigError(f"QUIRE_NATIVE must be 0 (use only torch) or 1 (the default), got {switch!r}")
    if switch == "0":
        logger.debug("native CPU kernels are turned off by QUIRE_NATIVE=0")
        return None
    try:
        native = importlib.import_module(_EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != _EXTENSION:
            raise
        logger.debug("native CPU kernels were not built: torch is used for everything")
        return None
    wanted, supported = os.environ.get("QUIRE_CPU_ISA"), native.supported_isas()
    if wanted is not None and wanted not in supported:
        raise ConfigError(f"QUIRE_CPU_ISA must be one of {', '.join(supported)} on this machine, or not set, got {wanted!r}")
    logger.debug("native CPU kernels: %s", native.isa())
    return native
