"""content_digest: what tells two servers of one model from servers of two."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from quire.serving.engine_client.messages import EngineInfo

_SAMPLE_BYTES = 4096
_WHOLE = ("config.json", "tokenizer.json", "tokenizer.model")
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def content_digest(info: EngineInfo) -> str:
    """Return 16 hexadecimal digits of what decides which tokens a model gives.

    That is the checkpoint's configuration, its tokenizer, its weights (the sizes of files, and samples from the middle and the
    end) and how they are run. Names of folders do not count.

    A file that cannot be read does not count either. Takes milliseconds, but reads files: do not call it on an event loop.
    """
    run = (info.architecture, info.dtype, info.quantization, info.device, info.kv_cache_dtype, info.vocab_size)
    found = hashlib.sha256(repr((*run, info.num_parameters, info.hidden_size)).encode())
    place = None if info.tokenizer_folder is None else Path(info.tokenizer_folder)
    files = [] if place is None else sorted(place.iterdir()) if place.is_dir() else [place]
    for path in files:
        is_whole = path.name in _WHOLE
        if is_whole or path.suffix in _WEIGHTS:
            found.update(path.name.encode() if is_whole else path.suffix.encode())
            found.update(_read(path, is_whole))
    return found.hexdigest()[:16]


def _read(path: Path, is_whole: bool) -> bytes:
    try:
        if is_whole:
            return path.read_bytes()
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            parts = [str(size).encode()]
            for start in (size // 2, max(size - _SAMPLE_BYTES, 0)):
                file.seek(start)
                parts.append(file.read(_SAMPLE_BYTES))
            return b"".join(parts)
    except OSError:
        return b""
