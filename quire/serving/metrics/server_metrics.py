"""ServerMetrics: counts events of the server and renders them for Prometheus."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from quire.api.unsupported_params import WITHOUT_EFFECT
from quire.serving.config import ServerConfig
from quire.serving.engine_client.messages import EngineInfo, RequestDelta, StepOutputs
from quire.serving.errors import BODY_ROOM_CODE, OVERLOADED_STATUS, ApiError
from quire.serving.interfaces import AbortReason, Job
from quire.serving.metrics.definitions import PREFIX, Definitions
from quire.serving.metrics.engine_load import EngineLoad
from quire.serving.metrics.engine_metrics import EngineMetrics, EngineOccupancy, EngineSource
from quire.serving.metrics.instruments import InstrumentCollector
from quire.serving.metrics.request_record import RequestRecord

KNOWN_IGNORED_PARAMS = WITHOUT_EFFECT | {
    *("service_tier", "store", "include_obfuscation", "truncation", "verbosity", "reasoning_effort", "effort", "thinking"),
    *("include", "modalities", "background", "context_management", "web_search", "image_generation", "namespace", "custom"),
}
"""The allowed label values of ignored_params, since a client can send any number of other names."""
_BY_CODE = {
    "overloaded": "overloaded",
    "rate_limit_exceeded": "rate_limited",
    "engine_unavailable": "engine_unavailable",
    "engine_error": "failed",
    "draining": "draining",
    "server_shutdown": "draining",
    "request_timeout": "deadline",
    "deadline_exceeded": "deadline",
    "slow_reader": "slow_reader",
    "storage_full": "storage",
    "too_many_connections": "connections",
    BODY_ROOM_CODE: "body_bytes",
}
_BY_STATUS = {
    401: "unauthorized", 403: "unauthorized", 404: "not_found", 405: "not_found", 408: "deadline", 413: "too_large",
    429: "rate_limited", 431: "too_large", 503: "unavailable", 504: "deadline", OVERLOADED_STATUS: "overloaded",
}  # fmt: skip
_CACHE_CONFIG = re.compile(rb"(?m)^vllm:cache_config_info\{.*$")
_LINE_START = re.compile(rb"(?m)^(# HELP |# TYPE )?" + PREFIX.encode())


class ServerMetrics:
    """The metrics of one server, in its own registry.

    on_end      called with every record that has ended: spans and the log
    on_collect  called before every rendering, to set gauges
    engines     of each engine
    """

    def __init__(
        self,
        config: ServerConfig,
        model_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        engines: Sequence[EngineSource] = (EngineSource(),),
        known_ignored_params: Collection[str] = KNOWN_IGNORED_PARAMS,
    ) -> None:
        self._config = config
        self._clock = clock
        self._known_ignored_params = known_ignored_params
        loads = [EngineLoad(clock) for _ in engines]
        labels = {"model_name": model_name, "engine": "0", **config.metric_labels}
        sources = [source.gauge_sources(load) for source, load in zip(engines, loads, strict=True)]
        self.defined = Definitions(labels, sources)
        self.engines = [
            EngineMetrics(self.defined, (str(index),) if len(engines) > 1 else (), source, load)
            for index, (source, load) in enumerate(zip(engines, loads, strict=True))
        ]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(InstrumentCollector(self.defined.all))
        self.records: dict[str, RequestRecord] = {}
        self.on_end: list[Callable[[RequestRecord], None]] = []
        self.on_collect: list[Callable[[], None]] = []
        self._cell_tokens = self.defined.generation_tokens.labels()
        self._cell_gaps = self.defined.inter_token.labels()
        self._max_loras = 0

    # Requests, in the order of their life cycle.

    def rejected(self, error: ApiError) -> None:
        """Count an error response, by its code if known, otherwise by its status."""
        by_status = _BY_STATUS.get(error.status, "failed" if error.status >= 500 else "invalid")
        self.defined.rejections.labels(_BY_CODE.get(error.code or "", by_status)).add()

    def opened(self, job: Job) -> RequestRecord:
        """Begin the record of an admitted request."""
        now_s = self._clock()
        arrival_s = job.request.arrival_time_s or now_s if job.received_s is None else job.received_s
        record = RequestRecord(job, arrival_s, opened_s=now_s)
        self.records[job.request.request_id] = record
        return record

    def dispatched(self, record: RequestRecord, dispatched_s: float) -> None:
        """Record when the request was sent to the engine."""
        record.dispatched_s = dispatched_s
        self.defined.queue_wait.labels(record.job.priority).observe(dispatched_s - record.opened_s)

    def aborted(self, record: RequestRecord, reason: AbortReason) -> None:
        """Record why a request is being ended (only the first reason); its end is recorded by `step` or `ended`."""
        if record.abort_reason is not None:
            return
        record.abort_reason = reason
        self.defined.aborts.labels(reason).add()
        if reason == "disconnect":
            self.defined.disconnects.labels(record.phase).add()

    def ended(self, record: RequestRecord, finish_reason: str, error: str | None = None) -> None:
        """End the record of a request whose last delta will not arrive. No effect if it has ended."""
        if record.ended_s is None:
            record.error = error
            self._end(record, finish_reason)

    def refused(self, record: RequestRecord, error: ApiError) -> None:
        """End the record of an invalid request: neither a server error nor a missed SLO."""
        if record.ended_s is None:
            record.error = error.message
            self._end_refused(record)

    def step(self, outputs: StepOutputs) -> None:
        """Record the outputs of a step of the engine."""
        now_s, num_tokens = self._clock(), 0
        num_by_last_s: dict[float, int] = {}
        for delta in outputs.deltas:
            record = self.records.get(delta.request_id)
            if record is None:
                continue
            num_new, last_s = self._take_tokens(record, delta), record.last_output_s
            if delta.metrics is not None:
                record.replica = outputs.replica
            if num_new:
                num_tokens += num_new
                record.last_output_s = now_s
                if last_s is None:
                    self._take_first(record, now_s)
                elif record.is_online:
                    num_by_last_s[last_s] = num_by_last_s.get(last_s, 0) + 1
            if delta.finished:
                self._take_end(record, delta)
        # Most requests had their previous token in the same step, so this is computed once.
        for last_s, count in num_by_last_s.items():
            self._cell_gaps.observe(now_s - last_s, count)
        if num_tokens:
            self._cell_tokens.value += num_tokens
        if outputs.report is not None:
            self.engines[outputs.replica].report(outputs.report)
            for part in outputs.report.parts if self._max_loras else ():
                if part.is_prefill and (record := self.records.get(part.request_id)) is not None:
                    record.has_begun = True

    def _take_tokens(self, record: RequestRecord, delta: RequestDelta) -> int:
        """Count the new tokens of a request and return how many they are."""
        num_tokens, counts = 0, record.choice_tokens
        for choice in delta.choices:
            num_new = len(choice.token_ids)
            num_tokens += num_new
            counts[choice.index] = counts.get(choice.index, 0) + num_new
            if choice.finish_reason is not None:
                record.finish_reasons.append(choice.finish_reason)
        if delta.metrics is not None:
            record.engine = delta.metrics
            if delta.finished:
                num_tokens += delta.metrics.num_unreturned_tokens
        record.num_output_tokens += num_tokens
        return num_tokens

    def _take_first(self, record: RequestRecord, now_s: float) -> None:
        record.first_output_s = now_s
        if record.is_online:
            self.defined.ttft.labels().observe(now_s - record.arrival_s)
        self._count_prompt(record)

    def _take_end(self, record: RequestRecord, delta: RequestDelta) -> None:
        if delta.embedding is not None:
            self._count_prompt(record)
        record.error = delta.error
        if delta.error is not None and delta.is_refused:
            self._end_refused(record)
            return
        self._end(record, "error" if delta.error is not None else "stop")

    def _count_prompt(self, record: RequestRecord) -> None:
        num_tokens = record.num_prompt_tokens
        num_cached = record.engine.num_cached_tokens if record.engine is not None else 0
        defined = self.defined
        defined.prompt_tokens.labels().add(num_tokens)
        defined.cached_tokens.labels().add(num_cached)
        defined.prompt_tokens_by_source.labels("local_cache_hit").add(num_cached)
        defined.prompt_tokens_by_source.labels("local_compute").add(num_tokens - num_cached)

    def _end_refused(self, record: RequestRecord) -> None:
        record.is_refused = True
        self._close(record, "error")
        self._record_end(record)

    def _close(self, record: RequestRecord, reason_of_rest: str) -> None:
        record.ended_s = self._clock()
        self.records.pop(record.job.request.request_id, None)
        num_missing = record.job.request.params.n - len(record.finish_reasons)
        record.finish_reasons.extend([reason_of_rest] * num_missing)

    def _record_end(self, record: RequestRecord) -> None:
        for listener in self.on_end:
            listener(record)

    def _end(self, record: RequestRecord, reason_of_rest: str) -> None:
        self._close(record, reason_of_rest)
        for reason in record.finish_reasons:
            self.defined.success.labels(reason).add()
        if record.is_online:
            self._observe_times(record)
        self._observe_sizes(record)
        if record.counts_for_goodput:
            self.defined.slo_counted.labels().add()
            if self._is_within_slo(record):
                self.defined.slo_met.labels().add()
        self._record_end(record)

    def _observe_times(self, record: RequestRecord) -> None:
        defined, engine = self.defined, record.engine
        if record.e2e_s is not None and (record.last_output_s is not None or record.has_ended_well):
            defined.e2e.labels().observe(record.e2e_s)
        if engine is None or engine.first_scheduled_time is None:
            return
        scheduled_s, first_s, finished_s = engine.first_scheduled_time, engine.first_token_time, engine.finished_time
        defined.queue_time.labels().observe(max(scheduled_s - record.arrival_s, 0.0))
        if first_s is not None:
            defined.prefill_time.labels().observe(first_s - scheduled_s)
        if finished_s is not None:
            defined.inference_time.labels().observe(finished_s - scheduled_s)
        if engine.decode_time_s is not None:
            defined.decode_time.labels().observe(engine.decode_time_s)
        if record.time_per_output_token_s is not None:
            defined.per_output_token.labels().observe(record.time_per_output_token_s)

    def _observe_sizes(self, record: RequestRecord) -> None:
        defined, params = self.defined, record.job.request.params
        defined.prompt_length.labels().observe(record.num_prompt_tokens)
        if record.engine is not None:
            defined.computed_prompt.labels().observe(record.num_prompt_tokens - record.engine.num_cached_tokens)
            defined.request_preemptions.labels().observe(record.engine.num_preemptions)
        if record.job.request.pooling is not None:
            return
        defined.generation_length.labels().observe(record.num_output_tokens)
        defined.longest_choice.labels().observe(record.longest_choice_tokens)
        defined.params_n.labels().observe(params.n)
        if params.max_tokens is not None:
            defined.max_tokens.labels().observe(params.max_tokens)

    def _is_within_slo(self, record: RequestRecord) -> bool:
        config = self._config
        measured = (
            (config.slo_ttft_s, record.ttft_s),
            (config.slo_tpot_s, record.time_per_output_token_s or 0.0),
            (config.slo_e2e_s, record.e2e_s),
        )
        return record.has_ended_well and all(limit is None or (t is not None and t <= limit) for limit, t in measured)

    # The engines.

    @property
    def num_engine_waiting(self) -> int:
        """Return how many sequences wait in the engines."""
        return sum(engine.num_waiting for engine in self.engines)

    def engine_state(self, state: str, replica: int = 0) -> None:
        """Record the state of an engine's process."""
        self.engines[replica].state(state)

    def engine_ready(self, info: EngineInfo, replica: int = 0) -> None:
        """Record the description of a loaded engine."""
        self._max_loras = info.max_loras
        self.engines[replica].ready(info)

    # The rest of the server.

    def http_request(self, route: str, code: int, seconds: float | None = None) -> None:
        """Count an answer. `route` is a template, never the path that a client sent; code 499 if the client had
        disconnected."""
        self.defined.http_requests.labels(route, str(code)).add()
        if seconds is not None:
            self.defined.http_seconds.labels(route).observe(seconds)

    def ignored_param(self, name: str) -> None:
        """Count a parameter that was sent and has no effect."""
        self.defined.ignored_params.labels(name if name in self._known_ignored_params else "other").add()

    def tool_parser(self, output_format: str, outcome: str) -> None:
        """Count an output that was parsed for tool calls: "parsed" or "none"."""
        self.defined.tool_parsers.labels(output_format, outcome).add()

    def batch_lines(self, state: str, count: int) -> None:
        """Set the number of lines of unfinished batches in a state."""
        self.defined.batch_lines.labels(state).set(count)

    def otlp_exports(self, num_sent: int, num_dropped: int) -> None:
        """Set how many requests were exported as spans since the start, and how many were dropped."""
        for outcome, total in (("sent", num_sent), ("dropped", num_dropped)):
            cell = self.defined.otlp_exports.labels(outcome)
            cell.add(total - cell.value)

    def loop_lag(self, seconds: float) -> None:
        """Record the lag of the event loop."""
        self.defined.loop_lag.labels().observe(max(seconds, 0.0))

    def occupancy(self) -> tuple[list[EngineOccupancy], int]:
        """Return how full each engine is, and how many requests wait: in the server's queue and in the engines'."""
        self._collect()
        return [engine.occupancy() for engine in self.engines], int(self.defined.waiting.labels().value)

    def prompt_totals(self) -> tuple[int, int]:
        """Return the prompt tokens of requests that reached their first output token, and those of them that were cached."""
        return int(self.defined.prompt_tokens.labels().value), int(self.defined.cached_tokens.labels().value)

    def render(self, compat: str | None = None) -> tuple[bytes, str]:
        """Return the exposition and its content type; with compat "vllm" under that prefix. Raises ApiError for any other.

        Without compat the names are those of --metrics-names.
        """
        if compat not in (None, "vllm"):
            raise ApiError(400, "compat must be 'vllm' or left out", code="invalid_value", param="compat")
        self._collect()
        names = compat or self._config.metrics_names
        text = generate_latest(self.registry)
        if names == "quire":
            return text, CONTENT_TYPE_LATEST
        renamed = _LINE_START.sub(rb"\1vllm:", text)
        renamed = _CACHE_CONFIG.sub(lambda line: line[0].replace(b"num_kv_blocks=", b"num_gpu_blocks="), renamed)
        return (text + renamed if names == "both" else renamed), CONTENT_TYPE_LATEST

    def _collect(self) -> None:
        for engine in self.engines:
            engine.write_restarts()
        if self._max_loras:
            self._write_adapters()
        for hook in self.on_collect:
            hook()

    def _write_adapters(self) -> None:
        """Endpoint pickers read the adapters of the newest sample, so its value is the time."""
        names: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for record in self.records.values():
            if record.job.request.lora is not None:
                names[record.has_begun][record.job.request.lora.lora_name] = None
        self.defined.adapters.replace(time.time(), str(self._max_loras), ",".join(names[True]), ",".join(names[False]))
