"""GET /api/tags, /api/ps and /api/version, POST /api/show: the model in the words of Ollama."""

from __future__ import annotations

import hashlib
from typing import Any

from quire.api.ollama.answers import LocalModel, ModelDetails, ModelTags, OllamaVersion, ShownModel
from quire.api.ollama.requests import ShowRequest
from quire.serving.answers import Answer, Ready
from quire.serving.context import ServerContext
from quire.serving.core.served_model import WILDCARD, ServedModel
from quire.serving.endpoint import Call
from quire.serving.errors import invalid
from quire.serving.ollama.names import check_model, line, moment

API_VERSION = "0.13.0"
"""Of Ollama: clients ask it to know which routes and fields there are."""

NEVER = "9999-12-31T23:59:59Z"


async def list_tags(context: ServerContext, call: Call) -> Answer:
    """List the names of the model, and its LoRA adapters."""
    return Ready(line(ModelTags(_listed(context))))


async def list_running(context: ServerContext, call: Call) -> Answer:
    """List the names again: the model is loaded, and stays so."""
    served = context.model
    models = _listed(context)
    for model in models:
        model.expires_at = NEVER
        model.size_vram = served.info.weight_bytes if served.info.device.startswith("cuda") else 0
        model.context_length = served.info.max_model_len
    return Ready(line(ModelTags(models)))


async def show_model(context: ServerContext, call: Call) -> Answer:
    """Describe the model."""
    body = await call.body(ShowRequest, any_media_type=True)
    name = body.model or body.name
    if name is None:
        raise invalid("model is required", "model", "missing_required_parameter")
    served = check_model(context, name)
    shown = ShownModel(
        modelfile=f"FROM {served.name}\n",
        parameters="\n".join(f"{key:<30} {value}" for key, value in sorted(served.info.generation_defaults.items())),
        template=served.template_source,
        details=_details(served, context.model.name if served.lora else ""),
        model_info=_model_info(served),
        capabilities=_capabilities(served),
        modified_at=moment(served.created_s),
    )
    return Ready(line(shown))


async def show_version(context: ServerContext, call: Call) -> Answer:
    """The version of Ollama whose API this is."""
    return Ready(line(OllamaVersion(API_VERSION)))


def _listed(context: ServerContext) -> list[LocalModel]:
    served = context.model
    names = [name for name in served.names if name != WILDCARD] or [served.name]
    adapters = context.adapters.names
    return [
        LocalModel(
            name=name,
            model=name,
            modified_at=moment(served.created_s),
            size=served.info.weight_bytes,
            digest=hashlib.sha256(served.fingerprint.encode()).hexdigest(),
            details=_details(served, names[0] if name in adapters else ""),
        )
        for name in (*names, *adapters)
    ]


def _details(served: ServedModel, parent: str = "") -> ModelDetails:
    """parent: the base model of a LoRA adapter."""
    info = served.info
    return ModelDetails(
        parent_model=parent,
        format="gguf" if info.model.lower().endswith(".gguf") else "safetensors",
        family=info.architecture,
        families=[info.architecture],
        parameter_size=_size(info.num_parameters),
        quantization_level=info.quantization or info.dtype,
    )


def _size(count: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _model_info(served: ServedModel) -> dict[str, Any]:
    info = served.info
    return {
        "general.architecture": info.architecture,
        "general.basename": served.name,
        "general.parameter_count": info.num_parameters,
        f"{info.architecture}.context_length": info.max_model_len,
        f"{info.architecture}.embedding_length": info.hidden_size,
        f"{info.architecture}.vocab_size": info.vocab_size,
    }


def _capabilities(served: ServedModel) -> list[str]:
    if served.info.pooler.task != "generate":
        return ["embedding"]
    is_found = {"tools": served.parsers.tool_format is not None, "thinking": served.reasons}
    return ["completion", *(name for name, found in is_found.items() if found)]
