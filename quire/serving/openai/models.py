"""GET /v1/models and /v1/models/{model}: the names of the model."""

from __future__ import annotations

from datetime import UTC, datetime

from quire.api.openai.answers import ModelCard, ModelList
from quire.serving.answers import Answer, Ready
from quire.serving.context import ServerContext
from quire.serving.core.served_model import WILDCARD, ServedModel, checkpoint_name
from quire.serving.endpoint import Call
from quire.serving.openai.frames import encode_json


async def list_models(context: ServerContext, call: Call) -> Answer:
    """List the names of the model."""
    served = context.model
    names = [name for name in served.names if name != WILDCARD] or [served.name]
    cards = [_model_card(served, name) for name in names]
    cards += [_model_card(adapted, adapted.name, parent=names[0]) for adapted in context.adapters.models]
    return Ready(encode_json(ModelList("list", cards, cards[0].id, cards[-1].id, has_more=False)))


async def get_model(context: ServerContext, call: Call) -> Answer:
    """Describe one of them."""
    name = call.path_params["model"]
    found = context.check_model(name)
    return Ready(encode_json(_model_card(found, name, parent=None if found.lora is None else context.model.name)))


def _model_card(served: ServedModel, name: str, parent: str | None = None) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=served.created_s,
        owned_by="quire",
        root=checkpoint_name(served.info),
        parent=parent,
        max_model_len=served.info.max_model_len,
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(served.created_s, UTC).isoformat(),
    )
