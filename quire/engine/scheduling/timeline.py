"""TimelineRecorder: records what happens to each unfinished request, for `quire explain` and traces.

The cost does not grow with the number of decoding sequences: a run of decode steps is the difference of the engine's totals at
its end and at its start. A step costs one event for each sequence that computes a prompt, and one addition for each sequence
with drafts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from quire.base.ids import RequestId, SequenceId
from quire.contracts.request import FinishReason
from quire.contracts.step import StepPlan, StepResult
from quire.contracts.timeline import PreemptReason, RequestTimeline, TimelineEvent, TimelineKind
from quire.engine.scheduling.host_tier import HostTierStats
from quire.engine.scheduling.sequence import Sequence

MAX_EVENTS = 512
"""Events of one request; after that, chunks are merged and others are only counted."""

_MAX_LONG_STEPS = 1024


@dataclass(slots=True)
class _Run:
    """A run of decode steps that has not ended: the engine's totals and the sequence's output at its start."""

    start_s: float
    step_id: int
    num_steps: int
    prefill_step_s: float
    num_output_tokens: int
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class _SequenceState:
    """The present state of a sequence: it waits (since waits_since_s), it computes its prompt, or it decodes (run)."""

    sequence: Sequence
    waits_since_s: float | None
    admitted_s: float = 0.0
    reason: PreemptReason | None = None
    run: _Run | None = None


class LongestSteps:
    """Answers which of the steps since any earlier one took longest.

    Only steps that are longer than all later ones are kept, so there are few; of very many the oldest are dropped.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._steps: list[tuple[float, int]] = []  # duration, step id

    def add(self, number: int, duration_s: float, step_id: int) -> None:
        """Add a step; numbers grow."""
        while self._steps and self._steps[-1][0] <= duration_s:
            self._steps.pop()
            self._numbers.pop()
        self._steps.append((duration_s, step_id))
        self._numbers.append(number)
        if len(self._steps) > _MAX_LONG_STEPS:
            del self._steps[0], self._numbers[0]

    def since(self, number: int) -> tuple[float, int]:
        """Return the duration and the id of the longest step whose number is not smaller; (0, -1) if there is none."""
        index = bisect_left(self._numbers, number)
        return self._steps[index] if index < len(self._steps) else (0.0, -1)


class TimelineRecorder:
    """Told about every change of a sequence by the scheduler, and about every step by the step loop.

    Sequences that were added before the recorder was made are ignored. Not thread-safe.

    tier_stats  of the host tier; None without one
    """

    def __init__(self, tier_stats: HostTierStats | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier_stats, self._clock = tier_stats, clock
        self._lives: dict[SequenceId, _SequenceState] = {}
        self._starting: dict[SequenceId, _SequenceState] = {}  # admitted, without a token since
        self._events: dict[RequestId, list[TimelineEvent]] = {}
        self._num_dropped: dict[RequestId, int] = {}
        self._held: dict[RequestId, tuple[TimelineKind, float]] = {}
        self._num_steps = 0
        self._prefill_step_s = 0.0
        self._longest = LongestSteps()
        self._tier_hits = self._read_tier_hits()

    @property
    def num_held(self) -> int:
        """Of how many requests and sequences anything is held."""
        return len(self._events) + len(self._lives.keys() | self._starting.keys())

    def hold(self, request_id: RequestId, kind: TimelineKind) -> None:
        """Begin a wait before the scheduler has the request, such as "compile"; it ends with the next call for it."""
        now = self._clock()
        self._end_hold(request_id, now)
        self._held[request_id] = (kind, now)

    def add(self, sequence: Sequence) -> None:
        """Begin the timeline of a sequence, which waits."""
        now = self._clock()
        self._end_hold(sequence.request.request_id, now)
        self._lives[sequence.sequence_id] = _SequenceState(sequence, now)

    def admit(self, sequence: Sequence) -> None:
        """Record that a sequence has got its blocks."""
        life, now = self._lives.get(sequence.sequence_id), self._clock()
        before, self._tier_hits = self._tier_hits, self._read_tier_hits()
        if life is None:
            return
        self._end_wait(life, now)
        self._append(
            life,
            TimelineEvent(
                "admit",
                sequence.choice,
                now,
                now,
                num_tokens=sequence.num_uncomputed_tokens,
                num_cached_tokens=sequence.num_computed_tokens,
                num_host_pages=self._tier_hits[0] - before[0],
                num_disk_pages=self._tier_hits[1] - before[1],
            ),
        )
        life.admitted_s = now
        self._starting[sequence.sequence_id] = life

    def preempt(self, sequence: Sequence, reason: PreemptReason) -> None:
        """Record that a sequence has lost its blocks."""
        life = self._lives.get(sequence.sequence_id)
        if life is None:
            return
        now = self._clock()
        self._end_run(life, now)
        self._starting.pop(sequence.sequence_id, None)
        life.waits_since_s, life.reason = now, reason

    def note_step(self, plan: StepPlan, result: StepResult, started_s: float, ended_s: float) -> None:
        """Record a step before it is committed."""
        planned = plan.num_scheduled_tokens
        chunks = [(key, life, planned[key]) for key, life in self._starting.items() if key in planned]
        self._num_steps += 1
        if any(num_tokens > 1 for _, _, num_tokens in chunks):
            self._prefill_step_s += ended_s - started_s
        self._longest.add(self._num_steps, ended_s - started_s, plan.step_id)
        num_step_tokens = plan.num_tokens if chunks else 0
        for sequence_id, life, num_tokens in chunks:
            chunk_s = max(started_s, life.admitted_s)
            chunk = TimelineEvent("prefill", life.sequence.choice, chunk_s, ended_s, plan.step_id, num_tokens, 1)
            self._append(life, chunk._replace(num_step_tokens=num_step_tokens))
            sampled = result.sampled.get(sequence_id)
            if sampled:
                del self._starting[sequence_id]
                num_output_tokens = life.sequence.num_output_tokens + len(sampled)
                life.run = _Run(ended_s, plan.step_id + 1, self._num_steps, self._prefill_step_s, num_output_tokens)
        for sequence_id, (num_drafts, num_accepted) in result.verified.items():
            life = self._lives.get(sequence_id)
            if life is not None and life.run is not None:
                life.run.num_drafts += num_drafts
                life.run.num_accepted += num_accepted

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End the timeline of a sequence."""
        life = self._lives.pop(sequence.sequence_id, None)
        if life is None:
            return
        now = self._clock()
        self._starting.pop(sequence.sequence_id, None)
        self._end_wait(life, now)
        self._end_run(life, now)
        self._append(
            life,
            TimelineEvent("finish", sequence.choice, now, now, num_tokens=sequence.num_output_tokens, reason=reason),
        )

    def take(self, request_id: RequestId) -> RequestTimeline:
        """Return the timeline of a request that has ended, and forget it."""
        self._end_hold(request_id, self._clock())
        return RequestTimeline(self._events.pop(request_id, []), self._num_dropped.pop(request_id, 0))

    def peek(self, request_id: RequestId) -> RequestTimeline | None:
        """Return the timeline of an unfinished request so far: what goes on ends now. None if there is no such request."""
        now = self._clock()
        held = self._held.get(request_id)
        lives = [life for life in self._lives.values() if life.sequence.request.request_id == request_id]
        if held is None and not lives:
            return None
        events = list(self._events.get(request_id, []))
        if held is not None:
            events.append(TimelineEvent(held[0], 0, held[1], now))
        for life in lives:
            if life.waits_since_s is not None:
                events.append(_wait(life, life.waits_since_s, now))
            if life.run is not None and self._num_steps > life.run.num_steps:
                events.append(self._decode(life.sequence, life.run, now))
        return RequestTimeline(events, self._num_dropped.get(request_id, 0))

    def _read_tier_hits(self) -> tuple[int, int]:
        stats = self._tier_stats
        return (0, 0) if stats is None else (stats.num_host_hits, stats.num_disk_hits)

    def _end_hold(self, request_id: RequestId, now: float) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._events.setdefault(request_id, []).append(TimelineEvent(held[0], 0, held[1], now))

    def _end_wait(self, life: _SequenceState, now: float) -> None:
        if life.waits_since_s is not None:
            self._append(life, _wait(life, life.waits_since_s, now))
            life.waits_since_s = None

    def _end_run(self, life: _SequenceState, now: float) -> None:
        if life.run is not None and self._num_steps > life.run.num_steps:
            self._append(life, self._decode(life.sequence, life.run, now))
        life.run = None

    def _decode(self, sequence: Sequence, run: _Run, now: float) -> TimelineEvent:
        longest_s, longest_id = self._longest.since(run.num_steps + 1)
        return TimelineEvent(
            "decode",
            sequence.choice,
            run.start_s,
            now,
            run.step_id,
            num_tokens=max(0, sequence.num_output_tokens - run.num_output_tokens),
            num_steps=self._num_steps - run.num_steps,
            num_drafts=run.num_drafts,
            num_accepted=run.num_accepted,
            prefill_step_s=self._prefill_step_s - run.prefill_step_s,
            longest_step_s=longest_s,
            longest_step_id=longest_id,
        )

    def _append(self, life: _SequenceState, event: TimelineEvent) -> None:
        request_id = life.sequence.request.request_id
        events = self._events.setdefault(request_id, [])
        if len(events) < MAX_EVENTS or event.kind == "finish":
            events.append(event)
            return
        last = events[-1]
        if event.kind == last.kind == "prefill" and event.choice == last.choice:
            events[-1] = last._replace(
                end_s=event.end_s,
                num_tokens=last.num_tokens + event.num_tokens,
                num_steps=last.num_steps + 1,
                num_step_tokens=last.num_step_tokens + event.num_step_tokens,
            )
        else:
            self._num_dropped[request_id] = self._num_dropped.get(request_id, 0) + 1


def _wait(life: _SequenceState, since_s: float, now: float) -> TimelineEvent:
    kind: TimelineKind = "queue" if life.reason is None else "preempt"
    return TimelineEvent(kind, life.sequence.choice, since_s, now, reason=life.reason or "")
