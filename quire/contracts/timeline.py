"""RequestTimeline: what the engine did for one request, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

TimelineKind = Literal["compile", "disk_read", "transfer", "queue", "admit", "prefill", "decode", "preempt", "finish"]
PreemptReason = Literal["kv_blocks", "priority", "rope"]


class TimelineEvent(NamedTuple):
    """One event of a sequence. A tuple, because it is sent between processes with the last output of a request.

    kind               compile    the request waits until its constraint is compiled
                       disk_read  it waits for KV pages from the disk tier
                       transfer   it waits for KV pages from a prefill engine
                       queue      the sequence waits for its first admission
                       admit      it gets its KV blocks (an instant)
                       prefill    one chunk of the prompt; after a preemption, of all known tokens
                       decode     a run of decode steps, from the first token to a preemption or the end
                       preempt    it has lost its blocks and waits
                       finish     the end of the sequence (an instant)
    choice             index of the sequence within its request
    start_s, end_s     seconds of the engine's clock, time.monotonic(); of a chunk: of its step, but not before the admission
    step_id            of the chunk, or of the first step after the start of the run; -1: none
    num_tokens         prefill: computed tokens; decode: new tokens; finish: output tokens; admit: tokens to compute
    num_steps          steps of the engine in a run; for a chunk 1, or more where chunks were merged
    num_step_tokens    prefill: tokens that the whole step computed, of all sequences
    num_cached_tokens  admit: tokens whose keys and values were there already
    num_host_pages     admit: KV pages of these tokens that were loaded from the host tier; num_disk_pages: from the disk tier
    num_drafts         decode: draft tokens that were verified; num_accepted: those that were accepted
    prefill_step_s     decode: seconds of the steps that computed prompts of other sequences, too
    longest_step_s     decode: duration of the longest step of the run, and its number, longest_step_id
    reason             finish: the finish reason; preempt: a PreemptReason
    """

    kind: TimelineKind
    choice: int
    start_s: float
    end_s: float
    step_id: int = -1
    num_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_pages: int = 0
    num_disk_pages: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    prefill_step_s: float = 0.0
    longest_step_s: float = 0.0
    longest_step_id: int = -1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The events of one request in the order in which they ended.

    num_dropped  events that were not recorded because there were too many
    """

    events: list[TimelineEvent]
    num_dropped: int = 0
