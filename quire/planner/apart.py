"""Prefill and decode apart: replicas of one layout divided between prompts and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from quire.planner.capacity import Objectives, Replica
from quire.planner.memory import Lengths
from quire.planner.step_time import StepWork

ASSUMED_LINK_BYTES_PER_S = 10e9
"""Of a device without a link in the table; the default of `quire simulate --link-gb-per-s`, too."""


@dataclass(frozen=True, slots=True)
class ApartPlan:
    """The division that serves the most requests within the objectives.

    num_prefill, num_decode  replicas of each role; batch: of a decode replica
    ttft_s          of a prompt of p95 length that starts at once: its prefill, the hand-over of its KV, and a decode step
    tpot_s          a decode step, which has no prompt in it
    requests_per_s  of all replicas together, at full use of the role that is the limit
    limit           "prefill" or "decode"
    """

    num_prefill: int
    num_decode: int
    batch: int
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    limit: str


def plan_apart(
    replica: Replica,
    num_replicas: int,
    lengths: Lengths,
    objectives: Objectives,
    kv_bytes_per_token: float,
    link_bytes_per_s: float | None,
    hit_share: float = 0.0,
) -> ApartPlan | None:
    """Return the best division of replicas; None where there are too few of them, or none is within the objectives.

    link_bytes_per_s  over which the KV of a prompt's computed tokens goes, after its last token; None: assumed
    """
    batch, _ = replica.largest_batch(lengths, Objectives(), hit_share)
    low = 0
    while low < batch:  # the largest batch whose decode step is within tpot: times grow with the batch
        middle = (low + batch + 1) // 2
        if objectives.tpot_s is None or replica.operate(middle, lengths, hit_share).decode_step_s <= objectives.tpot_s:
            low = middle
        else:
            batch = middle - 1
    if num_replicas < 2 or batch == 0:
        return None
    step_s = replica.operate(batch, lengths, hit_share).decode_step_s
    link = link_bytes_per_s or ASSUMED_LINK_BYTES_PER_S
    p95 = lengths.p95_input
    hand_over_s = (p95 - round(p95 * hit_share)) * kv_bytes_per_token / link
    ttft_s = replica.times.request_s + prompt_s(replica, p95, hit_share) + hand_over_s + step_s
    if objectives.ttft_s is not None and ttft_s > objectives.ttft_s:
        return None
    per_prefill = 1.0 / prompt_s(replica, round(lengths.mean_input), hit_share)
    per_step = max(1, batch // replica.num_in_flight)  # a pipeline's other stages compute other sequences
    per_decode = per_step * replica.num_in_flight / step_s / lengths.mean_output
    rates = {number: (number * per_prefill, (num_replicas - number) * per_decode) for number in range(1, num_replicas)}
    best = max(rates, key=lambda number: min(rates[number]))
    prefill, decode = rates[best]
    limit = "prefill" if prefill < decode else "decode"
    return ApartPlan(best, num_replicas - best, batch, ttft_s, step_s, min(prefill, decode), limit)


def prompt_s(replica: Replica, num_tokens: int, hit_share: float) -> float:
    """Return the time of a prompt's steps at a replica that does nothing else."""
    at, total = round(num_tokens * hit_share), 0.0
    while at < num_tokens:
        chunk = min(replica.limits.max_num_batched_tokens, num_tokens - at)
        total += replica.times.mean_s(StepWork.of_spans([(at, chunk)], replica.shape.windows, int(at + chunk == num_tokens)))
        at += chunk
    return max(total, 1e-9)
