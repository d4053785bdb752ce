"""The sender without HTTP: the same requests through AsyncLLM in this process, to measure the cost of HTTP."""

from __future__ import annotations

from typing import Any

from quire.base.errors import QuireError
from quire.bench.serving.http_client import Clock
from quire.bench.serving.records import RequestRecord
from quire.bench.serving.workload import Request
from quire.contracts.outputs import RequestOutput
from quire.contracts.sampling_params import SamplingParams
from quire.engine.async_llm import AsyncLLM


class EngineSender:
    """Sends requests to an engine of this process; options are fields of SamplingParams."""

    def __init__(self, engine: AsyncLLM, clock: Clock, options: dict[str, Any]) -> None:
        self._engine = engine
        self._clock = clock
        self._options = options

    async def send(self, request: Request, record: RequestRecord) -> None:
        """Complete the record of one request."""
        prompt = request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
        record.sent_s = self._clock()
        try:
            params = SamplingParams(**{**self._options, "max_tokens": request.num_output_tokens})
            async for output in self._engine.generate(prompt, params):  # type: ignore[arg-type]
                self._take(output, record, self._clock())
        except QuireError as error:
            record.fail(type(error).__name__, str(error), self._clock())

    def _take(self, output: RequestOutput, record: RequestRecord, now: float) -> None:
        choice = output.outputs[0]
        record.num_events += 1
        record.last_choice_s = now
        if record.first_choice_s is None:
            record.first_choice_s = now
            record.usage_prompt_tokens = len(output.prompt_token_ids)
        if choice.token_ids:
            if record.first_visible_s is None:
                record.first_visible_s = now
            record.usage_output_tokens = (record.usage_output_tokens or 0) + len(choice.token_ids)
            record.content_s.append(now)
            record.content_tokens.append(record.usage_output_tokens)
        if not output.finished:
            return
        record.finish_reason = choice.finish_reason
        record.has_done = True
        record.end_s = now
        if output.metrics is not None:
            record.usage_cached_tokens = output.metrics.num_cached_tokens
        if choice.finish_reason in ("stop", "length"):
            record.outcome = "ok"
        else:
            record.fail(f"finish_{choice.finish_reason}", output.error or "", now)
