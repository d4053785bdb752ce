"""Request bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with the fields of vLLM."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from quire.api.decode import Body
from quire.api.openai.shared import Name


class LoadAdapterRequest(Body, kw_only=True):
    """An adapter to load."""

    lora_name: Annotated[Name, Meta(description="What requests give as model.")]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096, description="A folder on the server.")]
    load_inplace: Annotated[bool, Meta(description="Replace an adapter of this name.")] = False


class UnloadAdapterRequest(Body, kw_only=True):
    """An adapter to unload."""

    lora_name: Name
    lora_int_id: Annotated[int | None, Meta(description="Not used: the name says which.")] = None
