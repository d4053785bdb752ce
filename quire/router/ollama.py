"""The Ollama API at a router: its lists of models; what computes is passed on by model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from quire.serving.ollama.models import API_VERSION, NEVER
from quire.serving.ollama.names import DEFAULT_TAG, moment


def plain_model(name: str, known: Iterable[str]) -> str:
    """Return a model's name without the tag that Ollama's clients add."""
    return name.removesuffix(DEFAULT_TAG) if name not in known else name


def answer_list(path: str, models: Mapping[str, Mapping[str, Any]], loaded: Iterable[str]) -> dict[str, Any] | None:
    """Return the answer of GET /api/tags, /api/ps and /api/version; None for other paths.

    models  entries of /v1/models by their names
    loaded  names of the models that are loaded, which /api/ps lists
    """
    if path == "/api/version":
        return {"version": API_VERSION}
    if path == "/api/tags":
        return {"models": [_entry(name, entry) for name, entry in models.items()]}
    if path == "/api/ps":
        return {"models": [{**_entry(name, models[name]), "expires_at": NEVER} for name in loaded if name in models]}
    return None


def _entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model; a router does not know what its weights are like."""
    return {
        "name": name,
        "model": name,
        "modified_at": moment(float(entry.get("created", 0))),
        "size": int(entry.get("memory_bytes", 0)),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
