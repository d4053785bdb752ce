"""ServerContext: what every handler may use, and the state of the server as a whole."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from quire.serving.config import ServerConfig
from quire.serving.errors import ApiError, engine_unavailable, not_found
from quire.serving.http.auth import Authenticator
from quire.serving.interfaces import Gateway

if TYPE_CHECKING:
    from quire.serving.batch.service import BatchService
    from quire.serving.generation.served_model import ServedModel
    from quire.serving.link.client import EngineClient
    from quire.serving.metrics.server_metrics import ServerMetrics
    from quire.serving.responses.store import ResponseStore

Phase = Literal["starting", "serving", "draining", "failed"]


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The parts of one server. `served` is None until the engine is loaded for the first time.

    failure      why the server gives up, where phase is "failed"
    signing_key  of this process, for what clients hold for it and send back
    keeps_responses  False: responses are never stored, and say so
    """

    config: ServerConfig
    gateway: Gateway
    client: EngineClient
    authenticator: Authenticator
    metrics: ServerMetrics
    served: ServedModel | None = None
    batches: BatchService | None = None
    responses: ResponseStore | None = None
    phase: Phase = "starting"
    failure: str | None = None
    keeps_responses: bool = True
    signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises ApiError 503 while there is none."""
        if self.served is None:
            raise engine_unavailable(self.failure or "the model is being loaded")
        return self.served

    def check_model(self, name: str | None) -> ServedModel:
        """Return the model that a request names. Raises ApiError 404 for a name that is not served, naming those that are."""
        served = self.model
        if name is not None and name not in served.names and "*" not in served.names:
            allowed = ", ".join(repr(known) for known in served.names)
            raise not_found(
                f"the model {name[:200]!r} does not exist here: {allowed} is served", code="model_not_found", param="model"
            )
        return served

    def check_accepting(self) -> None:
        """Raise ApiError 503 while the server drains."""
        if self.phase == "draining":
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=1.0)
