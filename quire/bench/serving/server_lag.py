"""The lag of the server's event loop during a run, and the number of its engine's steps, if its /metrics report them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from quire.bench.serving.http_client import HttpClient
from quire.bench.serving.http_wire import HttpError

_STEPS = re.compile(rb"^quire:iteration_tokens_total_count(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_BUCKET = re.compile(rb'^quire:event_loop_lag_seconds_bucket\{(?:[^}]*,)?le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LagCounts:
    """Cumulative histogram of the lag: (upper bound in seconds, observations), ascending, the last bound infinite."""

    buckets: tuple[tuple[float, float], ...]

    @classmethod
    def parse(cls, exposition: bytes) -> LagCounts | None:
        """Return the histogram in the text of /metrics; None if there is none."""
        found = sorted((float(bound), float(count)) for bound, count in _BUCKET.findall(exposition))
        return cls(tuple(found)) if found else None

    @property
    def count(self) -> int:
        """Total number of observations."""
        return int(self.buckets[-1][1])

    def since(self, before: LagCounts) -> LagCounts:
        """Return the observations after `before`, of the same server."""
        earlier = dict(before.buckets)
        return LagCounts(tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in self.buckets))

    def bound_of(self, share: float) -> float | None:
        """Return the lowest bound, in seconds, that covers this share of the observations; None without any."""
        if self.count == 0:
            return None
        return next((bound for bound, count in self.buckets if count >= share * self.count), math.inf)

    def figures(self) -> dict[str, float | None]:
        """Return the bounds in milliseconds, the available resolution; None past the last one, or without any."""
        names = {"p50_at_most": 0.5, "p99_at_most": 0.99, "max_at_most": 1.0}
        bounds = {name: self.bound_of(share) for name, share in names.items()}
        shown = {name: None if bound is None or math.isinf(bound) else bound * 1e3 for name, bound in bounds.items()}
        return {**shown, "count": self.count}


async def read_server_lag(client: HttpClient) -> LagCounts | None:
    """Return the histogram so far; None if the server does not report it, as other servers do not."""
    return LagCounts.parse(await _read_metrics(client))


async def read_server_steps(client: HttpClient) -> int | None:
    """Return the number of steps of the server's engine; None if the server does not report it."""
    found = _STEPS.search(await _read_metrics(client))
    return None if found is None else int(float(found[1]))


async def _read_metrics(client: HttpClient) -> bytes:
    try:
        response = await client.exchange(client.encode("GET", "/metrics"))
    except HttpError:
        return b""
    return response.body if response.status == 200 else b""
