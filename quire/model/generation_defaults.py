"""The sampling parameters that a checkpoint recommends in generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

from quire.base.errors import ModelFormatError

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(folder: Path) -> dict[str, float]:
    """Return those of temperature, top_p, top_k, min_p and repetition_penalty that the file gives.

    `do_sample: false` means temperature 0, as in transformers. Raises ModelFormatError when the file is damaged.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFormatError(f"{path} must hold a JSON object, got {type(config).__name__}")
    found = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFormatError(f"{path}: {name} must be a number, got {value!r}")
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
