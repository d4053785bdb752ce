"""RayServeConfig: the arguments of the Ray Serve application, as `build_app` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.base.errors import ConfigError
from quire.router.autoscale import Limits, Objectives
from quire.router.config import POLICIES, Policy

ROLE = "serve"
"""Replicas of Ray Serve all have the same role."""


class AutoscaleOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When replicas are added and removed: the fields of Objectives and Limits; see quire.router.autoscale.

    initial_replicas    at the start; None: min_replicas
    metrics_interval_s  between two reports of a replica to Ray's controller
    """

    max_replicas: int
    min_replicas: int = 1
    initial_replicas: int | None = None
    ttft_s: float = 1.0
    prompt_tokens_per_s: float = 10_000.0
    output_tokens_per_s: float = 1_000.0
    utilization: float = 0.8
    up_delay_s: float = 30.0
    down_delay_s: float = 300.0
    queue_delay_s: float = 10.0
    action_timeout_s: float = 600.0
    metrics_interval_s: float = 5.0

    def objectives(self) -> Objectives:
        """Return what a replica does. Raises ConfigError."""
        return Objectives(self.ttft_s, self.prompt_tokens_per_s, self.output_tokens_per_s)

    def limits(self) -> Limits:
        """Return what may be done. Raises ConfigError."""
        return Limits(
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            utilization=self.utilization,
            up_delay_s=self.up_delay_s,
            down_delay_s=self.down_delay_s,
            action_timeout_s=self.action_timeout_s,
            queue_delay_s=self.queue_delay_s,
        )


class RayServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model on Ray Serve.

    model                 a folder, a hub id or a bundled model
    options               of `quire serve`, {name: value} as in a file of --config
    num_replicas          engines; None with autoscaling
    autoscaling           None: the number of replicas is fixed
    policy                by which a request gets its replica; see quire.router.policy
    num_ingress_replicas  that read requests and pass them to the engines; each estimates by itself what caches hold
    max_ongoing_requests  that Ray gives a replica at once; more wait in Ray
    drain_timeout_s       for which a replica that is removed may finish its requests
    start_timeout_s       that a replica may take until it is ready
    max_retries           other replicas that are tried where one is lost before or in its answer
    max_body_bytes        of a request
    max_held_body_bytes   of all requests together that an ingress replica reads
    stats_period_s        between two reports of a replica's load to the routers
    prefix_chunk_bytes    of a prompt that one entry of the prefix index stands for
    max_prefix_chunks     entries for each replica
    ray_actor_options     of a replica, such as {"num_cpus": 4, "num_gpus": 1}
    """

    model: str
    options: dict[str, Any] = {}
    num_replicas: int | None = None
    autoscaling: AutoscaleOptions | None = None
    policy: Policy = "prefix"
    num_ingress_replicas: int = 1
    max_ongoing_requests: int = 256
    drain_timeout_s: float = 600.0
    start_timeout_s: float = 900.0
    max_retries: int = 2
    max_body_bytes: int = 32 << 20
    max_held_body_bytes: int = 512 << 20
    stats_period_s: float = 1.0
    prefix_chunk_bytes: int = 256
    max_prefix_chunks: int = 1 << 16
    ray_actor_options: dict[str, Any] = {}

    def check(self) -> None:
        """Raise ConfigError, naming the field, if a value is not allowed."""
        if not self.model.strip():
            raise ConfigError("model must not be empty")
        if self.autoscaling is not None and self.num_replicas is not None:
            raise ConfigError("num_replicas has no effect with autoscaling; give autoscaling.min_replicas and max_replicas")
        numbers = ("num_ingress_replicas", "max_ongoing_requests", "max_body_bytes", "max_held_body_bytes")
        for name in (*numbers, "prefix_chunk_bytes", "max_prefix_chunks"):
            _check_at_least(name, getattr(self, name), 1)
        if self.num_replicas is not None:
            _check_at_least("num_replicas", self.num_replicas, 1)
        _check_at_least("max_retries", self.max_retries, 0)
        for name in ("drain_timeout_s", "start_timeout_s", "stats_period_s"):
            _check_seconds(name, getattr(self, name))
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.autoscaling is not None:
            _check_seconds("autoscaling.metrics_interval_s", self.autoscaling.metrics_interval_s)
            options = self.autoscaling
            if options.initial_replicas is not None and not (
                options.min_replicas <= options.initial_replicas <= options.max_replicas
            ):
                raise ConfigError(
                    f"autoscaling.initial_replicas must be from min_replicas ({options.min_replicas}) to max_replicas "
                    f"({options.max_replicas}), got {options.initial_replicas}"
                )
            try:
                self.autoscaling.objectives()
                self.autoscaling.limits()
            except ConfigError as error:
                raise ConfigError(f"autoscaling: {error}") from None


def read_config(args: Mapping[str, Any]) -> RayServeConfig:
    """Return the configuration that a mapping describes. Raises ConfigError.

    `serve run` gives all values as text, so text that is a number is taken for one.
    """
    try:
        config = msgspec.convert(dict(args), type=RayServeConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the arguments of the application are not right: {error}") from None
    config.check()
    return config


def _check_at_least(name: str, number: int, least: int) -> None:
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, got {number}")


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name} must be a positive number of seconds, got {seconds:g}")
