"""OutputStream: turns the scheduler's updates of one request into text and RequestOutputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from quire.base.errors import RequestError
from quire.contracts.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.contracts.request import FinishReason, Request
from quire.contracts.step import TokenLogprobs
from quire.engine.scheduling.events import SequenceStats, SequenceUpdate
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.stop_strings import StopStringScanner
from quire.text.tokenizer import Tokenizer

OutputKind = Literal["cumulative", "delta", "final"]
"""What a step returns: everything so far, only the new part, or nothing before the request has finished."""


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far, and how much of it was returned.

    text  all text; for deltas only the part that was not returned, so that appending does not slow down with the length
    """

    index: int
    detokenizer: IncrementalDetokenizer | None = None
    scanner: StopStringScanner | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_sent_tokens: int = 0
    is_end_sent: bool = False


class OutputStream:
    """The outputs of one request. Not thread-safe: the step loop owns it."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, kind: OutputKind) -> None:
        params = request.params
        self.request = request
        # Which of the best_of choices are returned is known only at the end.
        self._prompt_token_ids = list(request.prompt_token_ids)
        self.kind: OutputKind = "final" if params.num_sequences > params.n else kind
        self.metrics = RequestMetrics(request.arrival_time_s)
        self._shown_metrics: RequestMetrics | None = None  # metrics of the last output, until they change
        self._needs_logprob = params.needs_logprob
        self._tokenizer = tokenizer if params.detokenize else None
        self._token_texts = tokenizer
        self.choices = [_Choice(index) for index in range(params.num_sequences)]
        self._num_unfinished = len(self.choices)
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(request.prompt_token_ids)
        self._num_prompt_logprobs = 0
        self._error: str | None = None
        self._error_param: str | None = None
        for choice in self.choices:
            if params.logprobs is not None:
                choice.logprobs = []
            if self._tokenizer is not None:
                choice.detokenizer = IncrementalDetokenizer(
                    self._tokenizer,
                    params.skip_special_tokens,
                    after=request.prompt_token_ids,
                    is_exact=params.constraint is not None,
                )
                if params.stop:
                    choice.scanner = StopStringScanner(tuple(params.stop), params.include_stop_str_in_output)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_unfinished == 0

    def apply(self, update: SequenceUpdate, now: float) -> bool:
        """Add an update of one sequence; return whether a stop string ended it, which the scheduler must be told."""
        choice = self.choices[update.choice]
        if choice.finish_reason is not None:  # the request failed in this step
            return False
        new_token_ids = update.new_token_ids
        if new_token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
            self._shown_metrics = None
        if update.start is not None:
            self._note_start(update.choice, update.start)
        if self._prompt_logprobs is not None:
            for offset, entry in enumerate(update.prompt_logprobs):
                self._prompt_logprobs[update.prompt_logprobs_start + offset] = self._describe(entry)
                self._num_prompt_logprobs += 1
        if choice.scanner is None and not update.logprobs:
            self._append_at_once(choice, new_token_ids, update.is_ended_by_token)
        else:
            for index, token_id in enumerate(new_token_ids):
                is_ending = update.is_ended_by_token and index == len(new_token_ids) - 1
                choice.token_ids.append(token_id)
                if update.logprobs:
                    self._append_logprobs(choice, update.logprobs[index])
                if choice.detokenizer is not None and self._append_text(choice, choice.detokenizer, token_id, is_ending):
                    return update.finish_reason is None
        if update.finish_reason is not None:
            self._end(choice, update)
        return False

    def resume(self) -> str:
        """Take in the output that a request goes on from, and return its text; deltas begin after it. Call before all else.

        Raises RequestError where a stop string has ended it.
        """
        choice, params = self.choices[0], self.request.params
        for token_id in self.request.output_token_ids:
            choice.token_ids.append(token_id)
            if choice.detokenizer is not None and self._append_text(choice, choice.detokenizer, token_id, False):
                raise RequestError(
                    f"output_token_ids: the output has ended: it contains one of the stop strings {params.stop!r}",
                    "output_token_ids",
                )
        text = choice.text
        if self.kind == "delta":
            choice.text = ""
            choice.num_sent_tokens = len(choice.token_ids)
        return text

    def _finish(self, choice: _Choice, reason: FinishReason | None, stop_reason: int | str | None = None) -> None:
        """Record why a choice has ended; a stop string in its last characters overrides the earlier reason."""
        self._num_unfinished -= choice.finish_reason is None
        choice.finish_reason, choice.stop_reason = reason, stop_reason

    def fail(self, error: str, param: str | None = None) -> None:
        """End every choice that has not ended with finish_reason "error"; param: the invalid field of the request."""
        self._note_error(error, param)
        for choice in self.choices:
            if choice.finish_reason is None:
                self._finish(choice, "error")

    def _note_error(self, error: str | None, param: str | None) -> None:
        """Record the first error."""
        if self._error is None:
            self._error, self._error_param = error, param

    def abort(self) -> None:
        """End every choice that has not ended with finish_reason "abort"."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._finish(choice, "abort")

    def add_stats(self, choice: int, stats: SequenceStats) -> None:
        """Record the scheduler's measurements of an ended sequence."""
        self._note_start(choice, stats)
        self.metrics.num_preemptions += stats.num_preemptions
        self.metrics.num_evicted_tokens += stats.num_evicted_tokens

    def note_end(self, now: float) -> None:
        """Record the end time of the request, before its last output is taken."""
        self.metrics.finished_time = now
        self._shown_metrics = None

    def _note_start(self, choice: int, stats: SequenceStats) -> None:
        times = (self.metrics.first_scheduled_time, stats.first_scheduled_s)
        self.metrics.first_scheduled_time = min((time for time in times if time is not None), default=None)
        if choice == 0:
            self.metrics.num_cached_tokens = stats.num_cached_tokens
        self._shown_metrics = None

    def _append_logprobs(self, choice: _Choice, logprobs: TokenLogprobs) -> None:
        choice.cumulative_logprob += logprobs.logprob
        if choice.logprobs is not None:
            choice.logprobs.append(self._describe(logprobs))

    def _append_at_once(self, choice: _Choice, token_ids: tuple[int, ...], is_ended_by_token: bool) -> None:
        """Add tokens that need no individual processing."""
        choice.token_ids += token_ids
        if choice.detokenizer is not None:
            is_ending_hidden = is_ended_by_token and not self.request.params.include_stop_str_in_output
            choice.text += choice.detokenizer.append(token_ids[:-1] if is_ending_hidden else token_ids)

    def _append_text(self, choice: _Choice, detokenizer: IncrementalDetokenizer, token_id: int, is_ending: bool) -> bool:
        """Add the text of a token; return whether it completes a stop string, which then ends the choice."""
        if is_ending and not self.request.params.include_stop_str_in_output:
            return False  # the token that ends an output is not part of its text
        piece = detokenizer.append((token_id,))
        if choice.scanner is None:
            choice.text += piece
            return False
        piece, stop = choice.scanner.feed(piece, len(choice.token_ids) > self.request.params.min_tokens)
        choice.text += piece
        if stop is not None:
            self._finish(choice, "stop", stop)
        return stop is not None

    def _end(self, choice: _Choice, update: SequenceUpdate) -> None:
        self._finish(choice, update.finish_reason, update.stop_reason)
        self._note_error(update.error, update.error_param)
        if choice.detokenizer is None:
            return
        rest = choice.detokenizer.finish()
        is_scanned = len(choice.token_ids) > self.request.params.min_tokens
        if choice.scanner is None or not is_scanned or update.finish_reason in ("abort", "error"):
            choice.text += rest if choice.scanner is None else choice.scanner.flush() + rest
            return
        rest, stop = choice.scanner.feed(rest)
        choice.text += rest
        if stop is not None:
            self._finish(choice, "stop", stop)
        else:
            choice.text += choice.scanner.flush()

    def _describe(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Return the dict of one position: first the token itself, then the most likely ones."""
        found = {entry.token_id: self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            if token_id not in found:
                found[token_id] = self._logprob(token_id, logprob, rank)
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None if self._token_texts is None else self._token_texts.token_text(token_id)
        return Logprob(logprob, rank, text)

    def take(self) -> RequestOutput | None:
        """Return the next output, or None."""
        is_finished = self.is_finished
        if self.kind == "final" and not is_finished:
            return None
        choices = self.choices
        if is_finished and len(choices) > self.request.params.n:
            choices = self._best()
            self._note_unreturned(choices)
        if self.kind == "delta":
            outputs = [
                self._delta(choice)
                for choice in choices
                if len(choice.token_ids) > choice.num_sent_tokens
                or (choice.finish_reason is not None and not choice.is_end_sent)
            ]
            if not outputs and not is_finished:
                return None
        else:
            outputs = [self._complete(choice, index) for index, choice in enumerate(choices)]
        if self._shown_metrics is None:
            self._shown_metrics = replace(self.metrics)
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=is_finished,
            prompt_logprobs=None if self._prompt_logprobs is None else self._take_prompt_logprobs(),
            metrics=self._shown_metrics,
            error=self._error,
            error_param=self._error_param,
        )

    def _take_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return the log probabilities of the whole prompt, once it is computed; only the first delta has them."""
        is_complete = self._num_prompt_logprobs == len(self.request.prompt_token_ids) - 1
        if self._prompt_logprobs is None or not is_complete:
            return None
        found = self._prompt_logprobs
        if self.kind == "delta":
            self._prompt_logprobs = None
        return found

    def _note_unreturned(self, returned: list[_Choice]) -> None:
        num_generated = sum(len(choice.token_ids) for choice in self.choices)
        self.metrics.num_unreturned_tokens = num_generated - sum(len(choice.token_ids) for choice in returned)
        self._shown_metrics = None

    def _best(self) -> list[_Choice]:
        """Return the choices of best_of that are returned, best first."""

        def rank(choice: _Choice) -> tuple[bool, float]:
            has_failed = choice.finish_reason in ("error", "abort")
            return has_failed, -choice.cumulative_logprob / max(1, len(choice.token_ids))

        return sorted(self.choices, key=rank)[: self.request.params.n]

    def _complete(self, choice: _Choice, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            cumulative_logprob=self._cumulative(choice),
            logprobs=None if choice.logprobs is None else list(choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _delta(self, choice: _Choice) -> CompletionOutput:
        first = choice.num_sent_tokens
        text, choice.text = choice.text, ""
        choice.num_sent_tokens = len(choice.token_ids)
        choice.is_end_sent = choice.finish_reason is not None
        return CompletionOutput(
            index=choice.index,
            text=text,
            token_ids=choice.token_ids[first:],
            cumulative_logprob=self._cumulative(choice),
            logprobs=None if choice.logprobs is None else choice.logprobs[first:],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _cumulative(self, choice: _Choice) -> float | None:
        return choice.cumulative_logprob if self._needs_logprob else None
