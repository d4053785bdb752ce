"""The sampling parameters that a checkpoint recommends in generation_config.json."""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import ModelFormatError, RequestError
from quire.base.gguf_file import is_gguf
from quire.contracts.sampling_params import SamplingParams
from quire.model.config_reader import read_json_object
from quire.model.gguf_config import read_gguf_sampling

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(folder: Path) -> dict[str, float]:
    """Return those of temperature, top_p, top_k, min_p and repetition_penalty that the file gives.

    `do_sample: false` means temperature 0, as in transformers. Of a GGUF file, what its metadata recommend.
    Raises ModelFormatError when the file is damaged.
    """
    path = folder if is_gguf(folder) else folder / "generation_config.json"
    if not path.exists():
        return {}
    config = read_gguf_sampling(path) if is_gguf(folder) else read_json_object(path)
    found: dict[str, float] = {}
    for name in _FIELDS:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFormatError(f"{path}: {name} must be a number, got {value!r}")
        found[name] = int(value) if name == "top_k" and float(value).is_integer() else value
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelFormatError(f"{path}: do_sample must be true or false, got {do_sample!r}")
    if do_sample is False:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelFormatError(f"{path}: {error}") from None
    return found
