"""ServerContext: the objects that routes which use the model need."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from quire.serving.config import ServerConfig
from quire.serving.core.lora_modules import LoraModules
from quire.serving.core.served_model import ServedModel
from quire.serving.errors import engine_unavailable, not_found, shutting_down
from quire.serving.interfaces import Gateway, Tenant
from quire.serving.public_error import show_error

T = TypeVar("T")
Phase = Literal["starting", "serving", "draining", "failed"]


@dataclass(slots=True)
class ServerState:
    """The phase of the server; written by Lifecycle only.

    failure  why the server gives up, where phase is "failed"
    """

    phase: Phase = "starting"
    failure: str | None = None


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The loaded model and the objects to run requests on it.

    served       None until the engine is loaded for the first time
    adapters     the LoRA adapters that clients can name
    signing_key  key of this process for data that clients store and send back
    """

    config: ServerConfig
    gateway: Gateway
    state: ServerState = field(default_factory=ServerState)
    served: ServedModel | None = None
    adapters: LoraModules = field(default_factory=LoraModules)
    signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises ApiError 503 while there is none."""
        if self.served is None:
            raise engine_unavailable(
                "the model is being loaded" if self.state.failure is None else show_error(self.state.failure)
            )
        return self.served

    @property
    def max_chat_bytes(self) -> int | None:
        """The limit of a body with one prompt; None before the model is loaded."""
        return None if self.served is None else self.served.max_chat_bytes

    def check_model(self, name: str | None) -> ServedModel:
        """Return the model that a request names. Raises ApiError 404 for a name that is not served, with the names that are."""
        served = self.model
        if name is None or served.is_called(name):
            return served
        adapted = self.adapters.find(name)
        if adapted is not None:
            return adapted
        if "*" not in served.names:
            allowed = ", ".join(repr(known) for known in (*served.names, *self.adapters.names))
            raise not_found(
                f"the model {name[:200]!r} does not exist here: {allowed} is served", code="model_not_found", param="model"
            )
        return served

    async def prepare(
        self, owner: Tenant, call_id: str | None, texts: object, function: Callable[[], T], *, may_run_here: bool = False
    ) -> T:
        """Run a function that renders or tokenises `texts` outside the event loop, fairly between owners, and return its
        result.

        call_id       of the HTTP request, which counts as in flight for its key; None for a line of a batch
        may_run_here  the function may run at once on the event loop if `texts` are short: it processes only them, and does not
                      render a chat template, which waits for another process

        Raises ApiError: 429 or 503 if the queue is full, and the errors of the function.
        """
        preparation = self.model.preparation
        with self.gateway.holding(owner.name, call_id):
            is_batch = call_id is None
            return await preparation.run(
                owner.name, texts, function, is_batch=is_batch, may_run_here=may_run_here and not is_batch
            )

    def check_accepting(self) -> None:
        """Raise ApiError 503 while the server drains."""
        if self.state.phase == "draining":
            raise shutting_down(after_s=self.gateway.drain_left_s)
