"""RequestRecord: times on the client's clock, counts, and the outcome of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Outcome = Literal["waiting", "running", "ok", "rejected", "failed", "aborted"]
"""rejected: status 429 or 503; failed: every other error; aborted: the run was interrupted."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request of a run. Times are seconds of one clock; None if the event never came. Only its sender writes it.

    index               in the workload
    scheduled_s         time at which the arrival process scheduled it
    num_prompt_tokens   length of the prompt as it was created
    num_wanted_tokens   requested output tokens
    sent_s              just before a connection was taken or opened for the first attempt
    first_choice_s      first event that has choices, even empty ones; last_choice_s the last such event
    first_visible_s     first event with text of the answer: not with reasoning or a tool call only
    content_s           every event with content: text, reasoning or a delta of a tool call
    content_tokens      output tokens up to and including each of those events, if the server reports them continuously
    end_s               the end of the response, or the time of the error
    error_kind          "" if ok, else a short category: "http_500", "connect", "truncated", "timeout", ...
    message             of the server or the socket
    status              of the last attempt
    num_retries         attempts after the first
    usage_*             the server's counts, None if it did not report them
    num_text_tokens     tokens of the output counted by the client, None without a tokenizer
    has_done            whether the stream ended with [DONE]
    num_events          events of the stream, excluding [DONE]
    """

    index: int
    scheduled_s: float
    num_prompt_tokens: int
    num_wanted_tokens: int
    sent_s: float | None = None
    first_choice_s: float | None = None
    last_choice_s: float | None = None
    first_visible_s: float | None = None
    content_s: array[float] = field(default_factory=lambda: array("d"))
    content_tokens: array[int] = field(default_factory=lambda: array("q"))
    end_s: float | None = None
    outcome: Outcome = "waiting"
    error_kind: str = ""
    message: str = ""
    status: int | None = None
    num_retries: int = 0
    usage_prompt_tokens: int | None = None
    usage_output_tokens: int | None = None
    usage_cached_tokens: int | None = None
    num_text_tokens: int | None = None
    finish_reason: str | None = None
    has_done: bool = False
    num_events: int = 0

    def fail(self, kind: str, message: str, now: float) -> None:
        """End the request with an error."""
        self.outcome = "failed"
        self.error_kind = kind
        self.message = message
        self.end_s = now

    @property
    def num_output_tokens(self) -> int:
        """Output tokens: the server's count, else the client's, else the number of events with content."""
        if self.usage_output_tokens is not None:
            return self.usage_output_tokens
        return len(self.content_s) if self.num_text_tokens is None else self.num_text_tokens

    @property
    def token_source(self) -> Literal["usage", "tokenizer", "chunks"]:
        """The source of num_output_tokens."""
        if self.usage_output_tokens is not None:
            return "usage"
        return "chunks" if self.num_text_tokens is None else "tokenizer"

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens: the server's count, else the client's."""
        return self.num_prompt_tokens if self.usage_prompt_tokens is None else self.usage_prompt_tokens

    def tokens_by_event(self) -> list[float]:
        """Return the number of output tokens of each event of content_s: as reported, else evenly distributed."""
        num_events = len(self.content_s)
        if num_events and len(self.content_tokens) == num_events:
            totals = [0, *self.content_tokens]
            return [float(after - before) for before, after in pairwise(totals)]
        return [self.num_output_tokens / num_events] * num_events if num_events else []
