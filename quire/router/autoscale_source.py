"""PrometheusSource: reads from Prometheus what `decide` needs to know of quire servers."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from quire.base.errors import ConfigError, QuireError
from quire.router.autoscale import ROLES, Demand, Replica, Role, Snapshot

_MAX_ANSWER_BYTES = 16 << 20
_MEAN = "45s"
_BY_ROLE: Mapping[str, str] = {
    "prompts": f"sum by (role) (rate(quire:prompt_tokens_total[{_MEAN}]))",
    "outputs": f"sum by (role) (rate(quire:generation_tokens_total[{_MEAN}]))",
    "queued": "sum by (role) (quire:queue_prompt_tokens)",
    "queue_growth": f"sum by (role) (deriv(quire:queue_prompt_tokens[{_MEAN}]))",
    "requests": f"sum by (role) (rate(quire:request_success_total[{_MEAN}]))",
    "refused": f"sum by (role) (rate(quire:admission_rejections_total[{_MEAN}]))",
    "slo": f"sum by (role) (rate(quire:slo_requests_total[{_MEAN}]))",
    "slo_met": f"sum by (role) (rate(quire:slo_requests_met_total[{_MEAN}]))",
}
"""What is read for each role, which is the label `role` (`quire serve --metric-labels role=prefill`); without it "serve"."""
_REPLICAS = 'max by (instance, role) (quire:engine_state{state="ready"})'
_RUNNING = "sum by (instance) (quire:num_requests_running)"


class SourceError(QuireError):
    """Prometheus did not answer as it should."""


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Vector


class PrometheusSource:
    """Asks one Prometheus server."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"prometheus must be a URL like http://host:9090, got {url[:200]!r}")
        self._url = url.rstrip("/") + "/api/v1/query"
        self._timeout_s = timeout_s

    def read(self, now_s: float) -> Snapshot:
        """Return the cluster as Prometheus saw it last. Raises SourceError.

        A role without replicas has no demand: nothing is known of it.
        """
        running = {one.metric.get("instance", ""): _number(one) for one in self._query(_RUNNING)}
        replicas = tuple(
            Replica(
                name := one.metric.get("instance", ""),
                _role(one),
                "ready" if _number(one) > 0 else "starting",
                int(running.get(name, 0.0)),
            )
            for one in sorted(self._query(_REPLICAS), key=lambda one: one.metric.get("instance", ""))
        )
        values = {name: {_role(one): _number(one) for one in self._query(query)} for name, query in _BY_ROLE.items()}
        roles = {replica.role for replica in replicas}
        return Snapshot(now_s, replicas, {role: _demand(values, role) for role in ROLES if role in roles})

    def _query(self, query: str) -> list[_Series]:
        url = f"{self._url}?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout_s) as answer:
                body = cast("bytes", answer.read(_MAX_ANSWER_BYTES + 1))
        except urllib.error.HTTPError as error:
            raise SourceError(f"Prometheus answers {error.code} to {query}: {_message(error.read(1000))}") from None
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"Prometheus at {self._url} does not answer: {error}") from None
        try:
            found = msgspec.json.decode(body, type=_Answer)
        except msgspec.DecodeError as error:
            raise SourceError(f"what answers at {self._url} is no Prometheus: {error}") from None
        return found.data.result


def _demand(values: Mapping[str, Mapping[Role, float]], role: Role) -> Demand:
    """Return the demand of a role: what was served, what more waits than before, and what was refused."""
    of_role = {name: found.get(role, 0.0) for name, found in values.items()}
    requests, refused = of_role["requests"], of_role["refused"]
    refused_factor = 1 + refused / requests if requests > 0 else 1.0
    prompts = max(of_role["prompts"] + of_role["queue_growth"], 0.0)
    attainment = of_role["slo_met"] / of_role["slo"] if of_role["slo"] > 0 else None
    return Demand(
        prompt_tokens_per_s=prompts * refused_factor,
        output_tokens_per_s=of_role["outputs"] * refused_factor,
        queued_tokens=of_role["queued"],
        attainment=attainment,
    )


def _role(series: _Series) -> Role:
    role = series.metric.get("role") or "serve"
    if role not in ROLES:
        raise SourceError(f"the label role must be one of {', '.join(ROLES)}, got {role[:100]!r}")
    return role


def _number(series: _Series) -> float:
    try:
        found = float(series.value[1])
    except ValueError:
        raise SourceError(f"Prometheus has a value that is no number: {series.value[1][:100]!r}") from None
    return found if math.isfinite(found) else 0.0


def _message(body: bytes) -> str:
    try:
        found: Any = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    return str(found.get("error", found)) if isinstance(found, dict) else str(found)
