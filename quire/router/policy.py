"""choose_backend: which backend gets a request. The three policies have one interface.

prefix        least predicted time to the first token: prompts that wait there, this one, and the tokens that its cache is not
              known to hold, at what a prompt and a token cost there, and the wait for a place where all are taken
least-loaded  fewest requests in flight, those of other clients included where the backend reports them
round-robin   one after the other
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.base.errors import InvariantError
from quire.router.backend import Backend
from quire.router.config import Policy
from quire.router.prompt import Prompt
from quire.router.prompt_cost import PromptCost

Reason = Literal["only", "prefix", "load", "sticky", "turn", "owner"]
FULL_KV_SHARE = 0.95
"""A backend with less free than this gets a request only where all others are as full."""
_TOKENS_PER_RUNNING = 8
"""What a running request adds to the wait of a new one, in prompt tokens: it takes part in each of its steps."""
_RECOVERING_FACTOR = 2.0
_TIE = 1.05
"""Predictions within 5 % are equal: affinity decides."""
_FIRST_REQUEST_S = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that gets a request, and why.

    num_cached_tokens  of the prompt that its cache is likely to hold
    predicted_s        to the first token; None where the policy does not predict
    """

    backend: Backend
    reason: Reason
    num_cached_tokens: int = 0
    predicted_s: float | None = None


Choose = Callable[[Sequence[Backend], Prompt], Choice]
"""Chooses among at least one available backend that serves the model."""


def rendezvous(backends: Sequence[Backend], affinity: bytes) -> list[Backend]:
    """Return the backends in an order that depends on `affinity` only: adding or removing one moves few keys."""

    def score(backend: Backend) -> bytes:
        return hashlib.blake2b(affinity, digest_size=8, key=hashlib.blake2b(backend.name.encode()).digest()).digest()

    return sorted(backends, key=score)


class PrefixPolicy:
    """Chooses by predicted time to the first token."""

    def __init__(self, default_cost: Callable[[], PromptCost]) -> None:
        self._default_cost = default_cost

    def __call__(self, backends: Sequence[Backend], prompt: Prompt) -> Choice:
        """Return the backend with the least prediction; equal ones by affinity."""
        if len(backends) == 1:
            return self._choice(backends[0], prompt, "only")
        roomy = [one for one in backends if one.load is None or one.load.kv_usage < FULL_KV_SHARE] or list(backends)
        cached = {one.name: one.num_cached(prompt) for one in roomy}
        predicted = {one.name: self._predict(one, prompt.num_tokens - cached[one.name]) for one in roomy}
        least = min(predicted.values())
        equal = [one for one in roomy if predicted[one.name] <= least * _TIE]
        most_cached = max(cached[one.name] for one in equal)
        best = [one for one in equal if cached[one.name] == most_cached]
        if len(best) > 1:
            return self._choice(rendezvous(best, prompt.affinity)[0], prompt, "sticky")
        return self._choice(best[0], prompt, "prefix" if most_cached > 0 else "load")

    def _choice(self, backend: Backend, prompt: Prompt, reason: Reason) -> Choice:
        num_cached = backend.num_cached(prompt)
        return Choice(backend, reason, num_cached, self._predict(backend, prompt.num_tokens - num_cached))

    def _predict(self, backend: Backend, num_new_tokens: int) -> float:
        cost = backend.cost or self._default_cost()
        num_running = backend.num_in_flight + backend.num_others
        num_ahead = backend.num_queued_tokens + _TOKENS_PER_RUNNING * num_running
        seconds = cost.seconds(backend.num_queued_prompts + 1, num_ahead + num_new_tokens) + _wait_for_place(
            backend, num_running
        )
        return seconds * _RECOVERING_FACTOR if backend.is_recovering else seconds


def _wait_for_place(backend: Backend, num_running: int) -> float:
    """Return the seconds until a place is free among those that run at once; 0 where there is one, or nobody knows."""
    num_places = backend.load.max_num_seqs if backend.load is not None else None
    if not num_places or num_running < num_places:
        return 0.0
    request_s = backend.request_s if backend.request_s is not None else _FIRST_REQUEST_S
    return (num_running - num_places + 1) / num_places * request_s


def least_loaded(backends: Sequence[Backend], prompt: Prompt) -> Choice:
    """Choose the backend with the fewest requests; equal ones by affinity."""
    loads = {one.name: one.num_in_flight + one.num_others for one in backends}
    least = min(loads.values())
    best = [one for one in backends if loads[one.name] == least]
    if len(backends) == 1:
        return Choice(best[0], "only")
    return Choice(best[0], "load") if len(best) == 1 else Choice(rendezvous(best, prompt.affinity)[0], "sticky")


class RoundRobinPolicy:
    """Chooses one backend after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, backends: Sequence[Backend], prompt: Prompt) -> Choice:
        """Return the next one."""
        self._turn += 1
        return Choice(backends[self._turn % len(backends)], "turn")


def make_policy(name: Policy, default_cost: Callable[[], PromptCost]) -> Choose:
    """Return the policy of a name."""
    if name == "prefix":
        return PrefixPolicy(default_cost)
    if name == "least-loaded":
        return least_loaded
    if name == "round-robin":
        return RoundRobinPolicy()
    raise InvariantError(f"there is no policy {name!r}")
