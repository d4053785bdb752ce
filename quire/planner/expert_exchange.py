"""Bytes that ranks with whole experts exchange in a layer, counted from even routing, and how long a layer takes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.contracts.expert_options import float8_row_bytes
from quire.contracts.model_spec import MoeSpec

EXCHANGED_BYTES = 1 << 20
"""Inputs of a layer beyond which GPU ranks exchange rows; below, each has all rows, and parts of sums are added."""
HALVES_ROWS = 256
"""Rows of a rank from which on they are exchanged in two halves."""

PAYLOADS = ("auto", "model", "fp8")


@dataclass(frozen=True, slots=True)
class ExpertLinks:
    """How rows travel. Raises ConfigError.

    payload      of the rows that experts read: the model's dtype, float8 with a scale for each row, or "auto": what GPU ranks
                 send. Results are in the model's dtype
    num_hosts    that the ranks are divided among; has_stages: a row goes once to each host, and is spread there
    halves       whether rows are exchanged in two halves; None: from HALVES_ROWS on
    network_bytes_per_s  between hosts, of each device; an assumption
    """

    payload: str = "auto"
    num_hosts: int = 1
    has_stages: bool = True
    halves: bool | None = None
    network_bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        if self.payload not in PAYLOADS:
            raise ConfigError(f"--expert-payload must be one of {', '.join(PAYLOADS)}, got {self.payload!r}")
        if self.num_hosts < 1:
            raise ConfigError(f"--hosts must be an integer >= 1, got {self.num_hosts}")
        if not 0 < self.network_bytes_per_s < math.inf:
            raise ConfigError(f"--network-gb-per-s must be a number > 0, got {self.network_bytes_per_s / 1e9:g}")

    def row_bytes(self, width: int, value_bytes: int, is_float8: bool) -> int:
        """Return the bytes of a row that experts read; is_float8: GPU ranks send it in float8."""
        is_wide = self.payload == "model" or (self.payload == "auto" and not is_float8)
        return width * value_bytes if is_wide else float8_row_bytes(width, width)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank receives, for each token of a step: within its host, and from other hosts; num_calls: collectives."""

    num_calls: int = 0
    local_bytes: float = 0.0
    network_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.num_calls + other.num_calls,
            self.local_bytes + other.local_bytes,
            self.network_bytes + other.network_bytes,
        )


def share_with_experts(mlp: MoeSpec, num_parts: int) -> float:
    """Return the share of rows that have experts in one of so many equal parts of the experts, if routing is even."""
    own, share = mlp.num_experts / num_parts, 1.0
    for choice in range(mlp.top_k):
        share *= max(0.0, mlp.num_experts - own - choice) / (mlp.num_experts - choice)
    return 1.0 - share


def copies_of_a_row(mlp: MoeSpec, num_ranks: int, links: ExpertLinks) -> tuple[float, float, int]:
    """Return how many copies of a row are sent within hosts, how many between them, and in how many stages."""
    hosts = links.num_hosts
    of_rank, on_host = share_with_experts(mlp, num_ranks), num_ranks // hosts
    if hosts == 1 or on_host == 1 or not links.has_stages:
        return (on_host - 1) * of_rank, (num_ranks - on_host) * of_rank, 1
    # The rank that a host's copy goes to needs no further one.
    return (num_ranks - hosts) * of_rank, (hosts - 1) * share_with_experts(mlp, hosts), 2


def dispatch_and_combine(
    mlp: MoeSpec,
    hidden_size: int,
    num_ranks: int,
    links: ExpertLinks,
    value_bytes: int,
    is_gathered: bool,
    is_float8: bool = False,
) -> tuple[Traffic, Traffic]:
    """Return what a layer sends to the experts, and what comes back.

    is_gathered  with deterministic: all ranks have all rows, so none is sent, and each pair comes back as a row of its own
    is_float8    the products take inputs in float8
    """
    local, network, stages = copies_of_a_row(mlp, num_ranks, links)
    width = mlp.latent_size or hidden_size
    there = links.row_bytes(width, value_bytes, is_float8) / num_ranks
    dispatch = Traffic() if is_gathered else Traffic(stages, local * there, network * there)
    back = width * value_bytes / num_ranks
    if is_gathered:
        hosts, on_host = links.num_hosts, num_ranks // links.num_hosts
        far = mlp.top_k * (hosts - 1) / hosts
        # In two stages pairs from another host go to the relay there first.
        near = mlp.top_k * (on_host - 1) / on_host if stages == 2 else mlp.top_k * (on_host - 1) / num_ranks
        return dispatch, Traffic(stages, near * back, far * back)
    return dispatch, Traffic(stages, local * back, network * back)


def seconds_in_halves(dispatch_s: float, experts_s: float, combine_s: float) -> float:
    """Return how long both halves of a layer take, given the times of one: while one computes, the other is on its way."""
    return dispatch_s + max(dispatch_s, experts_s) + max(experts_s, combine_s) + combine_s
