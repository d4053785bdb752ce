"""RouterCluster: what `decide` needs to know of the servers behind a router, and the way to flip and drain them."""

from __future__ import annotations

import http.client
import math
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.router.autoscale import ROLES, Action, Demand, Drain, Flip, Replica, ReplicaState, Role, Snapshot
from quire.router.autoscale_source import SourceError

logger = get_logger(__name__)

_MAX_ANSWER_BYTES = 16 << 20
_MEAN_S = 45.0
_TTFT, _TPOT = "time_to_first_token_seconds_bucket", "request_time_per_output_token_seconds_bucket"
_QUEUED = "queue_prompt_tokens"
_COMPUTED = "iteration_tokens_total_sum"
_NAMES = frozenset(
    {"prompt_tokens_total", "generation_tokens_total", "request_success_total", "admission_rejections_total", _COMPUTED}
    | {_QUEUED, _TTFT, _TPOT}
)
_REFUSED = 'reason="overloaded"'
_ROLES: Mapping[str, Role] = {"both": "serve", "prefill": "prefill", "decode": "decode"}

Totals = dict[tuple[str, str], float]
"""(metric, bound of a bucket or ""): the sum over its series."""


class _Backend(msgspec.Struct):
    name: str
    url: str
    state: str
    is_draining: bool
    role: str
    num_in_flight: int
    num_others: int

    @property
    def num_running(self) -> int:
        return self.num_in_flight + self.num_others


class _Backends(msgspec.Struct):
    backends: list[_Backend]


@dataclass(frozen=True, slots=True)
class _Look:
    """What the metrics of each server said at one moment."""

    at_s: float
    totals: Mapping[str, Totals]


class RouterCluster:
    """Reads `GET /router/backends` of a router and `/metrics` of the servers behind it. Rates are means since at most 45 s.

    A prefill server's demand is what it computed, and its objective the time to the first token; a decode server's objective is
    the time per output token. A server that does not answer is not in the snapshot, nor is one that is drained and idle: it is
    spare, and comes back where replicas are added.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        backend_key: str | None = None,
        *,
        ttft_s: float = 1.0,
        tpot_s: float | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Take the address of a router and its keys. tpot_s: None: the objective is always met. Raises ConfigError."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"router must be a URL like http://host:8080, got {url[:200]!r}")
        self._url = url.rstrip("/") + "/router/backends"
        self._admin_key, self._backend_key = admin_key, backend_key
        self._ttft_s, self._tpot_s, self._timeout_s = ttft_s, tpot_s, timeout_s
        self._looks: deque[_Look] = deque()
        self._spare: dict[str, Role] = {}

    def read(self, now_s: float) -> Snapshot:
        """Return the servers behind the router, and the demand of each role since the looks before. Raises SourceError."""
        try:
            listed = msgspec.json.decode(self._send("GET", self._url, self._admin_key), type=_Backends).backends
        except msgspec.DecodeError as error:
            raise SourceError(f"what answers at {self._url} is no router: {error}") from None
        self._spare = {one.name: _role(one) for one in listed if one.is_draining and not one.num_running}
        known = [one for one in listed if one.name not in self._spare and one.state != "unhealthy"]
        totals = {one.name: found for one in known if one.state == "ready" and (found := self._totals_of(one)) is not None}
        while self._looks and now_s - self._looks[0].at_s > _MEAN_S and len(self._looks) > 1:
            self._looks.popleft()
        self._looks.append(_Look(now_s, totals))
        names = {role: [one.name for one in known if _role(one) == role] for role in ROLES}
        replicas = tuple(Replica(one.name, _role(one), _state(one), one.num_running) for one in known)
        answering = [*names["serve"], *names["decode"]]
        return Snapshot(now_s, replicas, {role: self._demand(role, names[role], answering) for role in ROLES if names[role]})

    def carry_out(self, action: Action) -> str:
        """Do what an action says, as far as the router can; return what is left for others to do. Raises SourceError.

        The router starts no servers: of a Scale the spare servers of the role are used.
        """
        if isinstance(action, Flip):
            role = next(name for name, role in _ROLES.items() if role == action.role)
            self._send("PUT", self._path(action.replica, "role"), self._admin_key, msgspec.json.encode({"role": role}))
            return ""
        if isinstance(action, Drain):
            for name in action.replicas:
                self._send("POST", self._path(name, "drain"), self._admin_key)
            return ""
        spare = [name for name, role in self._spare.items() if role == action.role]
        for name in spare:
            self._send("POST", self._path(name, "resume"), self._admin_key)
        used = f", {', '.join(spare)} among them" if spare else ""
        return f"start servers of the role {action.role} and add them to the router until there are {action.num_replicas}{used}"

    def _demand(self, role: Role, names: Sequence[str], answering: Sequence[str]) -> Demand:
        """Return the demand of a role. answering: servers whose clients see how fast prompts are computed."""
        first, last = self._looks[0], self._looks[-1]
        before = self._looks[-2] if len(self._looks) > 1 else last
        mean, recent = _rates(first, last, names), _rates(before, last, names)
        served, refused = mean.get(("request_success_total", ""), 0.0), mean.get(("admission_rejections_total", ""), 0.0)
        factor = 1 + refused / served if served > 0 else 1.0
        prompts = ("prompt_tokens_total" if role != "prefill" else _COMPUTED, "")
        queued, queued_before = (
            sum(look.totals.get(name, {}).get((_QUEUED, ""), 0.0) for name in names) for look in (last, first)
        )
        growth = (queued - queued_before) / (last.at_s - first.at_s) if last.at_s > first.at_s else 0.0
        arriving = max(mean.get(prompts, 0.0) + growth, 0.0) * factor
        name, bound_s, of = (_TPOT, self._tpot_s, names) if role == "decode" else (_TTFT, self._ttft_s, answering)
        return Demand(
            prompt_tokens_per_s=arriving,
            output_tokens_per_s=mean.get(("generation_tokens_total", ""), 0.0) * factor,
            recent_share=recent.get(prompts, 0.0) / mean[prompts] if mean.get(prompts) else 1.0,
            queued_tokens=queued,
            attainment=None if bound_s is None else _share_within(_rates(first, last, of), name, bound_s),
        )

    def _totals_of(self, backend: _Backend) -> Totals | None:
        """Return None where the server does not answer: the others' figures are used."""
        try:
            return read_totals(self._send("GET", f"{backend.url}/metrics", self._backend_key).decode(errors="replace"))
        except SourceError as error:
            logger.warning("no figures of %s: %s", backend.name, error)
            return None

    def _path(self, name: str, action: str) -> str:
        return f"{self._url}/{urllib.parse.quote(name, safe=':[]')}/{action}"

    def _send(self, method: str, url: str, key: str | None, body: bytes | None = None) -> bytes:
        headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return cast("bytes", answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            raise SourceError(f"{method} {url} answers {error.code}: {error.read(500).decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{method} {url} fails: {error}") from None


def read_totals(text: str) -> Totals:
    """Return the sums of what `decide` needs from a server's metrics, whose names begin with quire: or vllm:."""
    prefix = "quire:" if "\nquire:" in text else "vllm:"
    found: Totals = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.removeprefix(prefix).partition("{")
        if name not in _NAMES or (name == "admission_rejections_total" and _REFUSED not in labels):
            continue
        key = (name, labels.partition('le="')[2].partition('"')[0])
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _rates(first: _Look, last: _Look, names: Iterable[str]) -> Totals:
    """Return how much each total has grown a second, over the servers that were there at both looks."""
    seconds, found = last.at_s - first.at_s, Totals()
    for name in names:
        old, new = first.totals.get(name), last.totals.get(name)
        if old is None or new is None or seconds <= 0:
            continue
        for key, value in new.items():
            grown = value - old.get(key, 0.0)
            found[key] = found.get(key, 0.0) + (grown if grown >= 0 else value) / seconds  # less than before: it was restarted
    return found


def _share_within(rates: Totals, name: str, bound_s: float) -> float | None:
    """Return the share of a histogram's samples up to a bound, between the bounds of buckets by a straight line."""
    counts = sorted((float(le), rate) for (found, le), rate in rates.items() if found == name)
    if not counts or counts[-1][1] <= 0:
        return None
    low, below = 0.0, 0.0
    for high, rate in counts:
        if bound_s <= high:
            part = (bound_s - low) / (high - low) if math.isfinite(high) else 0.0
            return min((below + (rate - below) * part) / counts[-1][1], 1.0)
        low, below = high, rate
    return 1.0


def _role(backend: _Backend) -> Role:
    return _ROLES.get(backend.role, "serve")


def _state(backend: _Backend) -> ReplicaState:
    if backend.is_draining:
        return "draining"
    return "ready" if backend.state == "ready" else "starting"
