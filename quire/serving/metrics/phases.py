"""Where the time of a request went: its phases, and a sentence about the longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from quire.contracts.timeline import TimelineEvent
from quire.serving.metrics.timelines import KeptTimeline

Phase = Literal[
    "prepare",
    "server_queue",
    "compile",
    "disk_read",
    "transfer",
    "engine_queue",
    "prefill",
    "decode",
    "preempted",
    "recompute",
    "other",
]
LABELS: dict[Phase, str] = {
    "prepare": "reading and tokenising the request",
    "server_queue": "waiting in the server's queue",
    "compile": "compiling the constraint on the output",
    "disk_read": "reading KV pages from the disk tier",
    "transfer": "waiting for a prefill server's KV pages",
    "engine_queue": "waiting in the engine's queue",
    "prefill": "computing the prompt",
    "decode": "generating tokens",
    "preempted": "waiting after a preemption",
    "recompute": "computing the discarded tokens again",
    "other": "messages between the server and the engine, and delivery",
}
"""The phases in the order in which a request goes through them."""

_PRIORITY: tuple[Phase, ...] = (
    "decode",
    "prefill",
    "recompute",
    "preempted",
    "engine_queue",
    "transfer",
    "disk_read",
    "compile",
    "server_queue",
    "prepare",
)
"""Where the sequences of a request are in several phases at a time, the first of these counts."""
_WAITS: dict[str, Phase] = {
    "queue": "engine_queue",
    "preempt": "preempted",
    "compile": "compile",
    "disk_read": "disk_read",
    "transfer": "transfer",
}
_REASONS = {
    "kv_blocks": "the KV cache was full",
    "priority": "a request with a higher priority had to run",
    "rope": "it became longer than the short variant of the rope allows",
}
_MIXED_SHARE = 0.25
"""From this share of the decode time on, steps with prompts of other requests are mentioned."""


class Span(NamedTuple):
    """A phase of one sequence, in seconds of time.monotonic()."""

    phase: Phase
    choice: int
    start_s: float
    end_s: float


def spans_of(kept: KeptTimeline) -> list[Span]:
    """Return the phases of a request's sequences; those of the server have choice 0."""
    dispatched_s = kept.ended_s if kept.dispatched_s is None else kept.dispatched_s
    found = [
        Span("prepare", 0, kept.arrival_s, max(kept.arrival_s, kept.opened_s)),
        Span("server_queue", 0, kept.opened_s, max(kept.opened_s, dispatched_s)),
    ]
    for choice in dict.fromkeys(event.choice for event in kept.events):
        found += _spans_of_choice([event for event in kept.events if event.choice == choice], kept.ended_s)
    return found


def _spans_of_choice(events: Sequence[TimelineEvent], end_s: float) -> list[Span]:
    found: list[Span] = []
    computing: Phase = "prefill"
    admitted_s: float | None = None
    for event in events:
        if admitted_s is not None and event.kind in ("decode", "preempt", "finish"):
            found.append(Span(computing, event.choice, admitted_s, event.start_s))
            admitted_s = None
        if event.kind in _WAITS:
            found.append(Span(_WAITS[event.kind], event.choice, event.start_s, event.end_s))
            computing = "recompute" if event.kind == "preempt" else computing
        elif event.kind == "decode":
            found.append(Span("decode", event.choice, event.start_s, event.end_s))
        elif event.kind == "admit":
            admitted_s = event.start_s
    if admitted_s is not None:  # of an unfinished request
        found.append(Span(computing, events[-1].choice, admitted_s, end_s))
    return found


def seconds_by_phase(kept: KeptTimeline) -> dict[Phase, float]:
    """Return the seconds of each phase in the order of LABELS, without those that took no time.

    Their sum is the time from the arrival to the end.
    """
    edges: list[tuple[float, int, Phase]] = []
    for span in spans_of(kept):
        start_s, end_s = max(span.start_s, kept.arrival_s), min(span.end_s, kept.ended_s)
        if end_s > start_s:
            edges.append((start_s, 1, span.phase))
            edges.append((end_s, -1, span.phase))
    edges.sort(key=lambda edge: edge[0])
    totals: dict[Phase, float] = dict.fromkeys(LABELS, 0.0)
    num_open: dict[Phase, int] = dict.fromkeys(LABELS, 0)
    last_s = kept.arrival_s
    for time_s, change, phase in edges:
        totals[next((one for one in _PRIORITY if num_open[one] > 0), "other")] += time_s - last_s
        num_open[phase] += change
        last_s = time_s
    totals["other"] += kept.ended_s - last_s
    return {phase: seconds for phase, seconds in totals.items() if seconds > 0}


def summary_of(kept: KeptTimeline, seconds: dict[Phase, float]) -> str:
    """Return a sentence about the phase that took longest."""
    total_s = sum(seconds.values())
    if not seconds or total_s <= 0:
        return "It took no measurable time."
    phase = max(seconds, key=lambda one: seconds[one])
    begin = f"{seconds[phase] / total_s:.0%} of the time ({format_s(seconds[phase])}) was spent {_activity(phase)}"
    detail = _detail(kept, phase, seconds[phase])
    return f"{begin}{': ' if detail else ''}{detail}."


def format_s(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 1.0:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _activity(phase: Phase) -> str:
    return f"on {LABELS[phase]}" if phase == "other" else LABELS[phase]


def _detail(kept: KeptTimeline, phase: Phase, seconds: float) -> str:
    if phase == "prefill":
        return _prefill_detail(kept, seconds)
    if phase == "decode":
        return _decode_detail(kept)
    if phase in ("preempted", "recompute"):
        reasons = dict.fromkeys(event.reason for event in kept.events if event.kind == "preempt")
        why = " and ".join(_REASONS.get(reason, reason) for reason in reasons)
        count = sum(event.kind == "preempt" for event in kept.events)
        return f"it lost its KV blocks {'once' if count == 1 else f'{count} times'} because {why}"
    if phase == "engine_queue":
        return "it waited for free KV blocks, for one of the engine's max_num_seqs places or for room in a step"
    if phase == "server_queue":
        return "the engine had as many requests as it takes"
    return ""


def _prefill_detail(kept: KeptTimeline, seconds: float) -> str:
    chunks = [event for event in kept.events if event.kind == "prefill"]
    num_tokens, num_steps = sum(chunk.num_tokens for chunk in chunks), sum(chunk.num_steps for chunk in chunks)
    text = f"{num_tokens} tokens in {num_steps} {'step' if num_steps == 1 else 'steps'}"
    if kept.num_cached_tokens:
        text += f", and {kept.num_cached_tokens} of {kept.num_prompt_tokens} prompt tokens came from the cache"
    num_others = sum(chunk.num_step_tokens for chunk in chunks) - num_tokens
    if num_others > num_tokens:
        text += f"; these steps also computed {num_others} tokens of other sequences"
    idle_s = seconds - sum(chunk.end_s - chunk.start_s for chunk in chunks)
    if idle_s > _MIXED_SHARE * seconds:
        text += f"; {format_s(idle_s)} of it passed in steps that had no room for this request"
    return text


def _decode_detail(kept: KeptTimeline) -> str:
    runs = [event for event in kept.events if event.kind == "decode"]
    run_s, num_steps = sum(run.end_s - run.start_s for run in runs), sum(run.num_steps for run in runs)
    num_tokens = sum(run.num_tokens for run in runs)
    if not num_steps:
        return ""
    choices = dict.fromkeys(run.choice for run in runs)
    most = max(sum(run.num_steps for run in runs if run.choice == choice) for choice in choices)
    of_choices = f" of {len(choices)} choices" if len(choices) > 1 else ""
    text = f"{num_tokens} tokens{of_choices} in {most} steps of {format_s(run_s / num_steps)}"
    num_drafts = sum(run.num_drafts for run in runs)
    if num_drafts:
        text += f", with {sum(run.num_accepted for run in runs)} of {num_drafts} draft tokens accepted"
    mixed_s = sum(run.prefill_step_s for run in runs)
    if run_s > 0 and mixed_s / run_s >= _MIXED_SHARE:
        text += f"; {mixed_s / run_s:.0%} of it in steps that also computed prompts of other requests"
    return text
