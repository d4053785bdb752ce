"""LoraModules: the LoRA adapters that clients can name as models."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from quire.base.errors import RequestError
from quire.contracts.lora import LoRARequest
from quire.serving.core.served_model import WILDCARD, ServedModel
from quire.serving.errors import from_quire_error, invalid, not_found

Load = Callable[[LoRARequest], Awaitable[None]]
"""Loads an adapter in the engine. Raises ApiError."""


@dataclass(slots=True)
class LoraModules:
    """The adapters by their names, in the order in which they were loaded. Belongs to the event loop.

    A name that is taken off the list stays with the requests that have it already.
    """

    _models: dict[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    _loading: set[str] = field(default_factory=set[str])
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all adapters."""
        return tuple(self._models)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models that clients see, one for each adapter."""
        return tuple(self._models.values())

    def find(self, name: str | None) -> ServedModel | None:
        """Return the model of an adapter's name."""
        return None if name is None else self._models.get(name)

    async def add(self, base: ServedModel, name: str, path: str, load: Load, replaces: bool = False) -> LoRARequest | None:
        """Load an adapter of the base model and list it; return the one that it replaces. Raises ApiError 400.

        replaces  an adapter of this name may be listed: it stays until the new one is loaded
        """
        if base.is_called(name) or name == WILDCARD:
            raise invalid(f"lora_name {name[:200]!r} is the name of the base model: choose another one", "lora_name")
        if name in self._models and not replaces:
            raise invalid(
                f"the LoRA adapter {name[:200]!r} is loaded already: unload it first, or choose another name", "lora_name"
            )
        if name in self._loading:
            raise invalid(f"the LoRA adapter {name[:200]!r} is being loaded by another request", "lora_name")
        try:
            lora = LoRARequest(name, next(self._numbers), path)
            model = base.with_lora(lora)
        except RequestError as error:
            raise from_quire_error(error) from error
        self._loading.add(name)
        try:
            await load(lora)
        finally:
            self._loading.discard(name)
        replaced = self._models.get(name)
        self._models[name] = model
        return None if replaced is None else replaced.lora

    def remove(self, name: str) -> LoRARequest:
        """Take an adapter off the list and return it. Raises ApiError 404."""
        model = self._models.pop(name, None)
        if model is None or model.lora is None:
            known = ", ".join(map(repr, self._models)) or "none"
            raise not_found(f"the LoRA adapter {name[:200]!r} is not loaded; loaded: {known}", param="lora_name")
        return model.lora
