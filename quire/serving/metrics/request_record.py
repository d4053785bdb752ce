"""RequestRecord: the measurements of one request from admission to its end, and its log line."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from quire.base.logging import get_logger
from quire.contracts.outputs import RequestMetrics
from quire.serving.interfaces import AbortReason, Job

_log = get_logger(__name__)

_GIVEN_UP_BY_CLIENT = frozenset({"disconnect", "cancelled", "slow_reader"})


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Written only by ServerMetrics. Times are seconds of time.monotonic().

    arrival_s          the head of the HTTP request had arrived; for a line of a batch, its prompt was tokenised
    dispatched_s       handed to the engine; None while queued
    has_begun          a step has computed tokens of its prompt; noted with enable_lora only
    first_output_s     the first output token arrived from the engine
    last_output_s      likewise the latest
    num_output_tokens  of all generated choices, including those of best_of that are not returned
    choice_tokens      output tokens of each returned choice, by its index
    engine             the engine's times and reused tokens, at the end its timeline; None until the first token
    replica            the engine that ran it, where there are several
    finish_reasons     of the choices that ended
    ended_s            None while the request is unfinished
    is_refused         a client error: the engine cannot serve the request, which got a 4xx
    """

    job: Job
    arrival_s: float
    opened_s: float
    dispatched_s: float | None = None
    first_output_s: float | None = None
    last_output_s: float | None = None
    ended_s: float | None = None
    num_output_tokens: int = 0
    choice_tokens: dict[int, int] = field(default_factory=dict[int, int])
    finish_reasons: list[str] = field(default_factory=list[str])
    engine: RequestMetrics | None = None
    replica: int = 0
    abort_reason: AbortReason | None = None
    error: str | None = None
    is_refused: bool = False
    has_begun: bool = False

    @property
    def phase(self) -> str:
        """Return "queue" before the engine has the request, "prefill" before its first token, "decode" after it."""
        if self.dispatched_s is None:
            return "queue"
        return "prefill" if self.first_output_s is None else "decode"

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of the prompt, cached or not."""
        return len(self.job.request.prompt_token_ids)

    @property
    def longest_choice_tokens(self) -> int:
        """Return the output tokens of the longest choice."""
        return max(self.choice_tokens.values(), default=0)

    @property
    def ttft_s(self) -> float | None:
        """Return seconds from arrival to the first output token, as seen by the server."""
        return None if self.first_output_s is None else self.first_output_s - self.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Return decode time over the tokens after the first, of the longest choice; None for one token."""
        decode_s = None if self.engine is None else self.engine.decode_time_s
        if decode_s is None or self.longest_choice_tokens < 2:
            return None
        return decode_s / (self.longest_choice_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Return seconds from arrival to the end; None while unfinished."""
        return None if self.ended_s is None else self.ended_s - self.arrival_s

    @property
    def is_online(self) -> bool:
        """Return whether the request is an online one, which is not paused for others, so that its times describe the
        server."""
        return self.job.priority != "batch"

    @property
    def counts_for_goodput(self) -> bool:
        """Return whether it is a valid online request that its client did not cancel."""
        return self.is_online and not self.is_refused and self.abort_reason not in _GIVEN_UP_BY_CLIENT

    @property
    def has_ended_well(self) -> bool:
        """Return whether every choice ended normally, or was ended by the server once it was complete."""
        allowed = {"stop", "length", "abort"} if self.abort_reason == "tool_cut" else {"stop", "length"}
        return self.error is None and bool(self.finish_reasons) and allowed.issuperset(self.finish_reasons)


def log_ended(record: RequestRecord) -> None:
    """Log the end of a request: register with ServerMetrics.on_end. It has counts and times, but no prompts or answers."""
    if not _log.isEnabledFor(logging.INFO):
        return
    engine = record.engine
    ttft, e2e = _round(record.ttft_s), _round(record.e2e_s)
    _log.info(
        "%s %s: %s, %d prompt and %d output tokens, first token after %s s, %s s in all",
        record.job.request.request_id,
        record.job.route,
        record.abort_reason or "/".join(sorted(set(record.finish_reasons))),
        record.num_prompt_tokens,
        record.num_output_tokens,
        "-" if ttft is None else ttft,
        e2e,
        extra={
            "request_id": record.job.request.request_id,
            "call_id": record.job.call_id,
            "route": record.job.route,
            "owner": record.job.owner.name,
            "priority": record.job.priority,
            "duration_s": e2e,
            "queue_s": None if engine is None else _round(engine.time_in_queue_s),
            "ttft_s": ttft,
            "time_per_output_token_s": _round(record.time_per_output_token_s),
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_cached_tokens": None if engine is None else engine.num_cached_tokens,
            "num_output_tokens": record.num_output_tokens,
            "finish_reasons": record.finish_reasons,
            "abort_reason": record.abort_reason,
        },
    )


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
