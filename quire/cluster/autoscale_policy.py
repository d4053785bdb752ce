"""AutoscalePolicy: Ray Serve's hook for the number of replicas, which asks quire.router.autoscale.decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from quire.base.logging import get_logger
from quire.cluster.config import ROLE, AutoscaleOptions
from quire.router.autoscale import Demand, Drain, Replica, Scale, Snapshot, State, decide

logger = get_logger(__name__)

PROMPT_TOKENS, OUTPUT_TOKENS, QUEUED_TOKENS, RECENT_SHARE = (
    *("prompt_tokens_per_s", "output_tokens_per_s"),
    *("queued_tokens", "recent_share"),
)
"""The figures that a replica reports as autoscaling stats."""


class ScalingContext(Protocol):
    """What is used of Ray's AutoscalingContext."""

    current_time: float | None
    current_num_replicas: int
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...

    @property
    def total_queued_requests(self) -> float | None: ...


class AutoscalePolicy:
    """Ray makes one for a deployment, in its controller, and calls it several times a second."""

    def __init__(self, **options: Any) -> None:
        """options: the fields of AutoscaleOptions."""
        found = msgspec.convert(options, type=AutoscaleOptions)
        self._objectives, self._limits = found.objectives(), found.limits()
        self._state = State()

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there shall be, and the (empty) state that Ray keeps."""
        target, num_running = context.target_num_replicas, context.current_num_replicas
        snapshot = Snapshot(context.current_time or 0.0, _replicas(num_running, target), {ROLE: self._demand(context)})
        actions, self._state = decide(snapshot, self._objectives, self._limits, self._state)
        for action in actions:
            if isinstance(action, Scale):
                target = action.num_replicas
            elif isinstance(action, Drain):
                target -= len(action.replicas)
            logger.info("autoscaling: %d replicas of %d run; %s", num_running, context.target_num_replicas, action)
        return target, {}

    def _demand(self, context: ScalingContext) -> Demand:
        metrics = context.aggregated_metrics or {}
        prompts, outputs = _sum(metrics, PROMPT_TOKENS), _sum(metrics, OUTPUT_TOKENS)
        # What waits in Ray has reached no replica, so its length is unknown: each request counts as what one replica computes
        # in half an objective, and more of them than replicas count as a queue that is too long.
        in_ray = (context.total_queued_requests or 0.0) * self._objectives.prompt_tokens_per_s * self._objectives.ttft_s / 2
        shares = [share for share in metrics.get(RECENT_SHARE, {}).values() if share > 0]
        return Demand(
            prompt_tokens_per_s=prompts,
            output_tokens_per_s=outputs,
            recent_share=sum(shares) / len(shares) if shares else 1.0,
            queued_tokens=_sum(metrics, QUEUED_TOKENS) + in_ray,
        )


def _replicas(num_running: int, target: int) -> tuple[Replica, ...]:
    """Return replicas with numbers for names. Ray chooses which replica it stops, so the last number is what goes."""
    return tuple(
        Replica(str(number), ROLE, "ready" if number < num_running else "starting", num_running=target - number)
        for number in range(target)
    )


def _sum(metrics: Mapping[str, Mapping[Any, float]], name: str) -> float:
    values: Iterable[float] = metrics.get(name, {}).values()
    return float(sum(values))
