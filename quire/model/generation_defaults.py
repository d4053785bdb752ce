"""The sampling parameters that a checkpoint recommends in generation_config.json."""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import ModelFormatError
from quire.model.config_reader import read_json_object

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(folder: Path) -> dict[str, float]:
    """Return those of temperature, top_p, top_k, min_p and repetition_penalty that the file gives.

    `do_sample: false` means temperature 0, as in transformers. Raises ModelFormatError when the file is damaged.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    config = read_json_object(path)
    found: dict[str, float] = {}
    for name in _FIELDS:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFormatError(f"{path}: {name} must be a number, got {value!r}")
        found[name] = value
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
