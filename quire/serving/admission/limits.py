"""OwnerLimits: the requests in flight of one API key, and its rate limits."""

from __future__ import annotations

import math
from collections import Counter

from quire.base.errors import ConfigError
from quire.serving.config import ApiKey


def check_key(key: ApiKey) -> None:
    """Raise ConfigError if a key's weight or limit would refuse every request."""
    if not 0 < key.weight < math.inf:
        raise ConfigError(f"api_keys: the weight of {key.name!r} must be above 0 and finite, got {key.weight}")
    for name in ("max_concurrent", "requests_per_minute", "tokens_per_minute"):
        value = getattr(key, name)
        if value is not None and value < 1:
            raise ConfigError(f"api_keys: {name} of {key.name!r} must be at least 1, or left out for no limit, got {value}")


class TokenBucket:
    """A token bucket that holds one minute's amount and fills continuously.

    A cost above the capacity passes when the bucket is full and leaves it negative, so the mean rate stays within the limit.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def level(self, now_s: float) -> float:
        """Return the available amount; negative while in debt."""
        gained = max(now_s - self._filled_s, 0.0) * self.per_minute / 60
        self._level = min(self._level + gained, float(self.per_minute))
        self._filled_s = max(now_s, self._filled_s)
        return self._level

    def seconds_until(self, cost: float, now_s: float) -> float:
        """Return how long until `cost` may be taken, 0 if it may be taken now."""
        missing = min(cost, float(self.per_minute)) - self.level(now_s)
        return max(missing, 0.0) * 60 / self.per_minute

    def take(self, cost: float, now_s: float) -> None:
        """Take `cost` out; a negative cost is returned, up to a full bucket."""
        self._level = min(self.level(now_s) - cost, float(self.per_minute))


class OwnerLimits:
    """The limits of one key, its requests and sequences in flight, and its token buckets."""

    def __init__(self, key: ApiKey | None, now_s: float) -> None:
        self.weight = key.weight if key is not None else 1.0
        self.max_concurrent = key.max_concurrent if key is not None else None
        self.calls = Counter[str]()  # jobs in flight of each request of the client
        self.num_sequences = 0  # of the classes "interactive" and "default"
        self.num_flex_sequences = 0  # of class "batch" for which a client waits
        self._requests = TokenBucket(key.requests_per_minute, now_s) if key is not None and key.requests_per_minute else None
        self._tokens = TokenBucket(key.tokens_per_minute, now_s) if key is not None and key.tokens_per_minute else None
        self._mean_output_tokens: float | None = None

    def seconds_until(self, num_tokens: float, now_s: float, num_requests: int = 1) -> tuple[float, str]:
        """Return how long until requests with this many tokens are within the rates, and the name of the limiting rate."""
        waits = [(0.0, "")]
        if self._requests is not None:
            waits.append(
                (self._requests.seconds_until(num_requests, now_s), f"{self._requests.per_minute} requests per minute")
            )
        if self._tokens is not None:
            waits.append((self._tokens.seconds_until(num_tokens, now_s), f"{self._tokens.per_minute} tokens per minute"))
        return max(waits)

    def charge(self, num_tokens: float, now_s: float, num_requests: int = 1) -> None:
        """Charge a request to the rates; with num_requests 0 only the tokens of a request that is already counted."""
        if self._requests is not None:
            self._requests.take(num_requests, now_s)
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def learn(self, num_output_tokens: int) -> None:
        """Record the output length of one ended sequence in a moving average over about the last twenty."""
        mean = self._mean_output_tokens
        self._mean_output_tokens = float(num_output_tokens) if mean is None else mean + 0.05 * (num_output_tokens - mean)

    def expected_output_tokens(self, max_tokens: int | None, default: int = 256) -> int:
        """Return the output tokens to expect of one sequence of this owner, at least 1."""
        expected = default if self._mean_output_tokens is None else math.ceil(self._mean_output_tokens)
        return max(1, expected if max_tokens is None else min(expected, max_tokens))

    def headers(self, now_s: float) -> dict[str, str]:
        """Return the x-ratelimit-* headers of the existing limits; empty for a key without rates."""
        found: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is None:
                continue
            level = bucket.level(now_s)
            found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(math.floor(level), 0))
            found[f"x-ratelimit-reset-{kind}"] = format_reset((bucket.per_minute - level) * 60 / bucket.per_minute)
        return found


def format_reset(seconds: float) -> str:
    """Return a duration in the format of the x-ratelimit-reset headers: "12ms", "1.5s" as "1s500ms", "6m0s"."""
    milliseconds = math.ceil(max(seconds, 0.0) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    if minutes:
        return f"{minutes}m{rest // 1000}s"
    whole, part = divmod(rest, 1000)
    if whole:
        return f"{whole}s{part}ms" if part else f"{whole}s"
    return f"{part}ms"
