"""build_app: quire as a Ray Serve application.

Two deployments: `ingress` reads HTTP requests and passes them on; each replica of `engine` runs `quire serve` with the model.
Ray chooses the engine's replica by our PrefixRequestRouter, counts its requests, and waits for them before it stops one.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from quire.base.ray_modules import import_ray, lacks_package

_USER = "the Ray Serve application"

try:
    import msgspec
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from quire.cli.fleet import check_replica_options
    from quire.cluster.config import RayServeConfig, read_config
    from quire.cluster.engine_server import EngineServer
    from quire.cluster.gateway import Gateway, Items, ReplicaLostError
    from quire.cluster.messages import AnswerFailure, AnswerHead, ForwardedRequest
except ModuleNotFoundError as error:
    raise lacks_package(_USER, error) from None

if TYPE_CHECKING:
    from ray.serve import Application

ENGINE, INGRESS = "engine", "ingress"
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
_POLL_S = 0.5
_MAX_INGRESS_REQUESTS = 4096
_POLICY = "quire.cluster.autoscale_policy:AutoscalePolicy"
_ROUTER = "quire.cluster.ray_router:PrefixRequestRouter"


def build_app(args: Mapping[str, Any]) -> Application:
    """Return the application of the fields of RayServeConfig. Raises ConfigError, and UnsupportedError without Ray.

    Use it as `serve run quire.cluster.ray_serve:build_app model=MODEL`, or as `import_path` in a Serve config file.
    """
    config = read_config(args)
    check_replica_options(config.model, config.options)
    serve, ray_config = import_ray(_USER, "ray.serve", "ray.serve.config")
    shared: dict[str, Any] = {
        "graceful_shutdown_timeout_s": config.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": _POLL_S,
    }
    engine = serve.deployment(EngineDeployment).options(
        name=ENGINE,
        max_ongoing_requests=config.max_ongoing_requests,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options=config.ray_actor_options,
        request_router_config=ray_config.RequestRouterConfig(
            request_router_class=_ROUTER.replace(":", "."),
            request_router_kwargs={
                "policy": config.policy,
                "prefix_chunk_bytes": config.prefix_chunk_bytes,
                "max_prefix_chunks": config.max_prefix_chunks,
            },
            request_routing_stats_period_s=config.stats_period_s,
            request_routing_stats_timeout_s=_HEALTH_TIMEOUT_S,
        ),
        **_scaling_options(config, ray_config),
        **shared,
    )
    ingress = serve.deployment(IngressDeployment).options(
        name=INGRESS, num_replicas=config.num_ingress_replicas, max_ongoing_requests=_MAX_INGRESS_REQUESTS, **shared
    )
    # Without what only this function needs: a replica is started again where its arguments change.
    bound = msgspec.structs.replace(config, num_replicas=None, autoscaling=None, num_ingress_replicas=1)
    return ingress.bind(bound, engine.bind(bound))


def _scaling_options(config: RayServeConfig, ray_config: Any) -> dict[str, Any]:
    options = config.autoscaling
    if options is None:
        return {"num_replicas": config.num_replicas or 1}
    policy = ray_config.AutoscalingPolicy(
        policy_function=_POLICY,
        policy_kwargs={name: getattr(options, name) for name in options.__struct_fields__},
    )
    # Ray's own delays come on top of a policy's; ours has them.
    return {
        "autoscaling_config": ray_config.AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            initial_replicas=options.initial_replicas,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=options.metrics_interval_s,
            look_back_period_s=2 * options.metrics_interval_s,
            policy=policy,
        )
    }


class EngineDeployment:
    """A replica with an engine. Ray awaits `__init__` and `__del__`."""

    async def __init__(self, config: RayServeConfig) -> None:  # type: ignore[misc]
        (serve,) = import_ray(_USER, "ray.serve")
        context = serve.get_replica_context()
        self._server = await EngineServer.start(config, context.replica_id.unique_id)

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[AnswerHead | bytes | AnswerFailure]:
        """Yield the items of an answer."""
        async with aclosing(self._server.forward(request)) as items:
            async for item in items:
                yield item

    async def check_health(self) -> None:
        """Raise where Ray shall replace this replica."""
        await self._server.check_health()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what PrefixRequestRouter reads."""
        return await self._server.record_routing_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what AutoscalePolicy reads; Ray asks only where there is such a policy."""
        return await self._server.record_autoscaling_stats()

    async def __del__(self) -> None:
        if hasattr(self, "_server"):  # it has started
            await self._server.close()


class IngressDeployment:
    """A replica that reads HTTP requests."""

    def __init__(self, config: RayServeConfig, engine: Any) -> None:
        self._handle = engine.options(stream=True)
        self._gateway = Gateway(config, self._send)
        exceptions = importlib.import_module("ray.exceptions")
        serve_exceptions = importlib.import_module("ray.serve.exceptions")
        self._lost = (exceptions.RayActorError, exceptions.NodeDiedError, serve_exceptions.RayServeException)

    async def __call__(self, request: Request) -> Response:
        """Return what answers a request."""
        return _GatewayResponse(self._gateway)

    async def _send(self, request: ForwardedRequest) -> Items:
        response = self._handle.forward.remote(request)
        try:
            async for item in response:
                yield item
        except self._lost as error:
            raise ReplicaLostError(f"{type(error).__name__}: {str(error)[:300]}") from None
        finally:
            response.cancel()  # has no effect after the end


class _GatewayResponse(Response):
    """The gateway as the response of a deployment: it reads the body and writes the answer by itself."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway(scope, receive, send)
