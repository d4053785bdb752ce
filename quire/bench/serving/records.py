"""What is written down about one request while it runs: times of the client's clock, counts, and how it ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Outcome = Literal["waiting", "running", "ok", "rejected", "failed", "aborted"]
"""rejected: status 429 or 503; failed: every other error; aborted: the run was interrupted."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request of a run. Times are seconds of one clock; None where the event never came. Only its sender writes it.

    index               place in the workload
    scheduled_s         when the arrival process wanted it sent
    num_prompt_tokens   length of the prompt as it was made
    num_wanted_tokens   output tokens that were asked for
    sent_s              just before the connection was taken, or opened, for the first attempt
    first_choice_s      first event that has choices, even empty ones; last_choice_s the last such event
    content_s           every event with content: text, reasoning or a piece of a tool call
    content_tokens      output tokens up to and with each of those events, where the server reports them all along
    end_s               the end of the response, or when the error was seen
    error_kind          "" when ok, else a short class: "http_500", "connect", "truncated", "timeout", ...
    message             what the server or the socket said
    status              of the last attempt
    num_retries         attempts beyond the first
    usage_*             what the server counted, None where it did not say
    num_text_tokens     the output tokenised by the client, None without a tokenizer
    has_done            whether the stream ended with [DONE]
    num_events          events of the stream, [DONE] left out
    """

    index: int
    scheduled_s: float
    num_prompt_tokens: int
    num_wanted_tokens: int
    sent_s: float | None = None
    first_choice_s: float | None = None
    last_choice_s: float | None = None
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
        """Where num_output_tokens comes from."""
        if self.usage_output_tokens is not None:
            return "usage"
        return "chunks" if self.num_text_tokens is None else "tokenizer"

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens: the server's count, else the client's."""
        return self.num_prompt_tokens if self.usage_prompt_tokens is None else self.usage_prompt_tokens

    def tokens_by_event(self) -> list[float]:
        """Return how many output tokens each event of content_s brought: as reported, else all events alike."""
        num_events = len(self.content_s)
        if num_events and len(self.content_tokens) == num_events:
            totals = [0, *self.content_tokens]
            return [float(after - before) for before, after in pairwise(totals)]
        return [self.num_output_tokens / num_events] * num_events if num_events else []
