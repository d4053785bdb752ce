"""EmbeddingStream: turns the scheduler's updates of a request with pooling params into its one output."""

from __future__ import annotations

from quire.contracts.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestMetrics
from quire.contracts.request import FinishReason, Request
from quire.engine.scheduling.events import SequenceStats, SequenceUpdate


class EmbeddingStream:
    """The output of one embedding, with the methods of OutputStream. Not thread-safe: the step loop owns it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.metrics = RequestMetrics(request.arrival_time_s)
        self._embedding: list[float] = []
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self._finish_reason is not None

    def apply(self, update: SequenceUpdate, now: float) -> bool:
        """Record the end of the sequence; returns False, since there are no stop strings."""
        if self._finish_reason is None:
            self._embedding = list(update.pooled or ())
            self._finish_reason, self._error = update.finish_reason, update.error
        return False

    def fail(self, error: str, param: str | None = None) -> None:
        """End with finish_reason "error"; param is not used, since no field of such a request can fail this late."""
        self._embedding, self._finish_reason, self._error = [], "error", error

    def abort(self) -> None:
        """End with finish_reason "abort"."""
        self._finish_reason = self._finish_reason or "abort"

    def add_stats(self, choice: int, stats: SequenceStats) -> None:
        """Record the scheduler's measurements of the sequence."""
        self.metrics.first_scheduled_time = stats.first_scheduled_s
        self.metrics.num_preemptions = stats.num_preemptions
        self.metrics.num_cached_tokens = stats.num_cached_tokens

    def note_end(self, now: float) -> None:
        """Record the end time of the request, before its output is taken."""
        self.metrics.finished_time = now

    def take(self) -> EmbeddingRequestOutput | None:
        """Return the output if the request has ended, otherwise None."""
        if self._finish_reason is None:
            return None
        return EmbeddingRequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=EmbeddingOutput(self._embedding, self._finish_reason),
            metrics=self.metrics,
            error=self._error,
        )
