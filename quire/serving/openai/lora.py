"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.openai.lora import LoadAdapterRequest, UnloadAdapterRequest
from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.lora import LoRARequest
from quire.serving.answers import Answer, Ready, Unary
from quire.serving.context import ServerContext
from quire.serving.endpoint import Call, Endpoint
from quire.serving.engine_client.client import EngineClient
from quire.serving.errors import ApiError

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoraRoutes:
    """The objects that these routes use."""

    context: ServerContext
    engines: Sequence[EngineClient]

    async def load(self, lora: LoRARequest) -> None:
        """Load an adapter in every engine that is ready; where one fails, or the caller gives up, in none. Raises ApiError.

        A replica that restarts loads it for the first request that names it.
        """
        ready = [engine for engine in self.engines if engine.state == "ready"]
        try:
            for engine in ready or self.engines:
                await engine.load_adapter(lora)
        except BaseException:
            for engine in self.engines:
                engine.unload_adapter(lora.lora_int_id)
            raise

    async def load_modules(self, modules: Sequence[tuple[str, str]]) -> None:
        """Load the adapters that the server starts with: (name, path). Raises ConfigError."""
        for name, path in modules:
            try:
                await self.context.adapters.add(self.context.model, name, path, self.load)
            except ApiError as error:
                raise ConfigError(f"lora_modules {name}={path}: {error.message}") from error

    def unload(self, name: str) -> None:
        """Take an adapter off the list, and out of the engines once their requests have ended. Raises ApiError."""
        self.drop(self.context.adapters.remove(name))

    def drop(self, lora: LoRARequest) -> None:
        """Take an adapter out of the engines once its requests have ended."""
        for engine in self.engines:
            engine.unload_adapter(lora.lora_int_id)


async def post_load(parts: LoraRoutes, call: Call) -> Answer:
    """Load an adapter, for callers with an admin key."""
    _check_admin(call)
    body = await call.body(LoadAdapterRequest)
    context = parts.context
    base = context.model

    async def work() -> Ready:
        replaced = await context.adapters.add(base, body.lora_name, body.lora_path, parts.load, body.load_inplace)
        if replaced is not None:
            parts.drop(replaced)
        logger.info("LoRA adapter %s is loaded by %s", body.lora_name, call.owner.name)
        return _said(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    return Unary(work)


async def post_unload(parts: LoraRoutes, call: Call) -> Answer:
    """Unload an adapter, for callers with an admin key; requests that use it go on."""
    _check_admin(call)
    body = await call.body(UnloadAdapterRequest)
    parts.unload(body.lora_name)
    logger.info("LoRA adapter %s is unloaded by %s", body.lora_name, call.owner.name)
    return _said(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_admin(call: Call) -> None:
    if not call.owner.is_admin:
        raise ApiError(
            403, "LoRA adapters are loaded and unloaded with an admin key (admin: true in --api-key-file)", code="admin_only"
        )


def _said(text: str) -> Ready:
    return Ready(text.encode(), media_type="text/plain; charset=utf-8")


ENDPOINTS: tuple[Endpoint[LoraRoutes], ...] = (
    Endpoint(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=post_load,
        summary="Load a LoRA adapter",
        tag="lora",
        body=LoadAdapterRequest,
        success_media_type="text/plain",
    ),
    Endpoint(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=post_unload,
        summary="Unload a LoRA adapter",
        tag="lora",
        body=UnloadAdapterRequest,
        success_media_type="text/plain",
    ),
)
