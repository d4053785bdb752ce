"""content_digest: a hash of a model's files, equal on two servers if they serve the same model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from quire.serving.engine_client.messages import EngineInfo

_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64
_CONFIGURATION = ("config.json",)
_TOKENIZER = ("tokenizer.json", "tokenizer.model")
_WEIGHTS = ("model*.safetensors", "*.safetensors", "*.gguf", "pytorch_model*.bin")
"""Files of weights: those of the first of these patterns that any has."""


def content_digest(info: EngineInfo) -> str:
    """Return 16 hexadecimal digits of what decides which tokens a model gives.

    That is the checkpoint's configuration, its tokenizer, its weights (the sizes of files, and samples of them) and how they
    are run. Names of folders do not count.

    A file that cannot be read does not count either. Takes milliseconds, but reads files: do not call it on an event loop.
    """
    run = (info.architecture, info.dtype, info.quantization, info.device, info.kv_cache_dtype, info.vocab_size)
    found = hashlib.sha256(repr((*run, info.num_parameters, info.hidden_size)).encode())
    model = Path(info.model_folder)
    tokenizer = model if info.tokenizer_folder is None else Path(info.tokenizer_folder)
    for path in [*_files(model, _CONFIGURATION), *_files(tokenizer, _TOKENIZER)]:
        found.update(path.name.encode() + _read(path, is_whole=True))
    for path in [model] if model.is_file() else _weights(model):
        found.update(path.suffix.encode() + _read(path, is_whole=False))
    return found.hexdigest()[:16]


def _files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _weights(folder: Path) -> list[Path]:
    return next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), [])


def _read(path: Path, is_whole: bool) -> bytes:
    try:
        if is_whole:
            return path.read_bytes()
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            parts = [str(size).encode()]
            for place in range(1, _NUM_SAMPLES + 1):  # the last one ends the file
                file.seek(max(size * place // _NUM_SAMPLES - _SAMPLE_BYTES, 0))
                parts.append(file.read(_SAMPLE_BYTES))
            return b"".join(parts)
    except OSError:
        return b""
