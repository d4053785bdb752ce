"""Conversion of the engine's outputs to the deltas that are sent."""

from __future__ import annotations

from quire.contracts.outputs import CONTRADICTIONS, CompletionOutput, EmbeddingRequestOutput, Logprob, RequestOutput
from quire.serving.engine_client.messages import ChoiceDelta, RequestDelta, TokenLogprob


class DeltaWriter:
    """Turns RequestOutputs (of kind "delta") into RequestDeltas, with metrics only if they are new."""

    def __init__(self) -> None:
        self._without_tokens: set[str] = set()

    def begin(self, request_id: str) -> None:
        """Register a request that the engine has accepted."""
        self._without_tokens.add(request_id)

    def write(self, output: RequestOutput | EmbeddingRequestOutput) -> RequestDelta:
        """Return the new part of a request's output."""
        if isinstance(output, EmbeddingRequestOutput):
            return self._embedding(output)
        if output.error_param is not None and output.finished:
            self.forget(output.request_id)
            return RequestDelta(
                output.request_id, [], True, error=output.error, error_param=output.error_param, is_refused=True
            )
        request_id, has_metrics = output.request_id, output.finished
        if request_id in self._without_tokens and (has_metrics or any(choice.token_ids for choice in output.outputs)):
            self._without_tokens.discard(request_id)
            has_metrics = True
        return RequestDelta(
            request_id,
            [choice_delta(choice) for choice in output.outputs],
            output.finished,
            output.metrics if has_metrics else None,
            None if output.prompt_logprobs is None else [_position(entry) for entry in output.prompt_logprobs],
            output.error,
            output.error_param,
            is_refused=output.error_param is not None or output.error in CONTRADICTIONS,
        )

    def _embedding(self, output: EmbeddingRequestOutput) -> RequestDelta:
        self._without_tokens.discard(output.request_id)
        return RequestDelta(
            output.request_id,
            [ChoiceDelta(0, "", [], finish_reason=output.outputs.finish_reason)],
            finished=True,
            metrics=output.metrics,
            error=output.error,
            embedding=output.outputs.embedding or None,
        )

    def forget(self, request_id: str) -> None:
        """Remove a request that ended without a last output."""
        self._without_tokens.discard(request_id)


def choice_delta(choice: CompletionOutput) -> ChoiceDelta:
    """Return a choice of an output as the message that is sent."""
    return ChoiceDelta(
        choice.index,
        choice.text,
        choice.token_ids,
        None if choice.logprobs is None else [_entries(entry) for entry in choice.logprobs],
        choice.finish_reason,
        choice.stop_reason,
        choice.cumulative_logprob,
    )


def _position(entry: dict[int, Logprob] | None) -> list[TokenLogprob] | None:
    return None if entry is None else _entries(entry)


def _entries(entry: dict[int, Logprob]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, found.logprob, found.rank) for token_id, found in entry.items()]
