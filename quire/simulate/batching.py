"""Batching policies: which requests of a replica's queue its scheduler may see."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from quire.base.errors import ConfigError
from quire.contracts.request import Request

Policy = Literal["continuous", "dynamic", "static"]
POLICIES: tuple[Policy, ...] = ("continuous", "dynamic", "static")


@dataclass(frozen=True, slots=True)
class Batching:
    """How batches are formed. Raises ConfigError.

    policy     "continuous": every request goes to the scheduler at once. "static": a batch of batch_size starts when the one
               before has ended as a whole. "dynamic": the same, but a smaller batch starts max_delay_s after its first request
               came. With static and dynamic nobody joins a running batch, and places of ended outputs stay empty
    """

    policy: Policy = "continuous"
    batch_size: int = 8
    max_delay_s: float = 0.1

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"--batching must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size must be an integer >= 1, got {self.batch_size}")
        if not 0 <= self.max_delay_s < float("inf"):
            raise ConfigError(f"--batch-delay-ms must be a number of at least 0, got {self.max_delay_s * 1000:g}")

    def describe(self) -> str:
        """Return the policy for people."""
        if self.policy == "continuous":
            return "continuous batching"
        delay = f", at most {self.max_delay_s * 1000:g} ms after the first" if self.policy == "dynamic" else ""
        return f"{self.policy} batches of {self.batch_size}{delay}"


class BatchQueue:
    """The requests of one replica that its scheduler has not seen."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._waiting: deque[tuple[float, Request]] = deque()
        self.is_closed = False  # no further request comes: what is left is the last batch
        self.is_flushed = False  # the next batch starts even if it is incomplete

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return sum(len(request.prompt_token_ids) for _, request in self._waiting)

    def add(self, request: Request, now: float) -> None:
        """Queue a request."""
        self._waiting.append((now, request))

    def take(self, is_idle: bool, now: float) -> list[Request]:
        """Return what the scheduler gets now; is_idle: it has nothing unfinished."""
        if not self._waiting:
            return []
        if self._batching.policy == "continuous":
            return self._pop(len(self._waiting))
        if not is_idle:
            return []
        is_due = self.is_closed or self.is_flushed or len(self._waiting) >= self._batching.batch_size
        deadline = self.deadline_s
        if is_due or (deadline is not None and now >= deadline):
            self.is_flushed = False
            return self._pop(min(len(self._waiting), self._batching.batch_size))
        return []

    @property
    def deadline_s(self) -> float | None:
        """When an incomplete batch starts; None: not by time."""
        if self._batching.policy != "dynamic" or not self._waiting:
            return None
        return self._waiting[0][0] + self._batching.max_delay_s

    def _pop(self, number: int) -> list[Request]:
        return [self._waiting.popleft()[1] for _ in range(number)]
