"""Every metric of the server: name, labels, buckets, and its definition as the help text.

Apart from the prefix, the names and buckets are those of vLLM's dashboards; buckets are added where these
are too coarse for a small model. All metrics have the labels model_name and engine, and no label has text from a client.
With several replicas, metrics of an engine also have the label replica, a number from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.serving.metrics.instruments import Counter, Gauge, Histogram, Instrument

PREFIX = "quire:"

# fmt: off
TTFT_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
TOKEN_BUCKETS = (
    .0005, .001, .002, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
REQUEST_BUCKETS = (
    .001, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)
STEP_BUCKETS = (.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LAG_BUCKETS = (.001, .0025, .005, .0075, .01, .015, .02, .025, .05, .1, .25, .5, 1, 2.5, 5)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
# The same for every model, so that histograms of several servers can be added.
LENGTH_BUCKETS = (*(step * 10**power for power in range(6) for step in (1, 2, 5)), 1_000_000)
# fmt: on


@dataclass(frozen=True, slots=True)
class GaugeSources:
    """The sources that gauges of an engine read at every collection; None omits the sample."""

    heartbeat_age_s: Callable[[], float | None]
    flops_per_s: Callable[[], float | None]
    bytes_per_s: Callable[[], float | None]
    mfu: Callable[[], float | None]
    mbu: Callable[[], float | None]


class Definitions:
    """The instruments of one server as attributes; `all` has them in the order of definition.

    sources    of each engine
    of_engine  metrics with no labels other than that of an engine
    """

    def __init__(self, labels: dict[str, str], sources: Sequence[GaugeSources]) -> None:
        self._labels = labels
        self.replica_labels = ("replica",) if len(sources) > 1 else ()
        self.of_engine: list[Instrument] = []
        self.all: list[Instrument] = []
        self._define_engine()
        self._define_tokens()
        self._define_times()
        self._define_sizes(LENGTH_BUCKETS)
        self._define_ends()
        self._define_server()
        self._define_ranks()
        self._define_experts()
        self._define_tiers()
        self._define_load(sources)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(PREFIX + name, text, self._labels, labels)
        self.all.append(made)
        return made

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made = Gauge(PREFIX + name, text, self._labels, labels)
        self.all.append(made)
        return made

    def _engine_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made = self._gauge(name, text, *self.replica_labels, *labels)
        self.of_engine += () if labels else (made,)
        return made

    def _engine_counter(self, name: str, text: str, *labels: str) -> Counter:
        made = self._counter(name, text, *self.replica_labels, *labels)
        self.of_engine += () if labels else (made,)
        return made

    def _engine_histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        made = self._histogram(name, text, bounds, *self.replica_labels)
        self.of_engine.append(made)
        return made

    def _read_gauge(self, name: str, text: str, reads: Sequence[Callable[[], float | None]]) -> None:
        values = [(str(index),) if self.replica_labels else () for index in range(len(reads))]
        reads_of = list(zip(values, reads, strict=True))
        self.all.append(Gauge(PREFIX + name, text, self._labels, self.replica_labels, reads_of))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        made = Histogram(PREFIX + name, text, self._labels, bounds, labels)
        self.all.append(made)
        return made

    def _define_engine(self) -> None:
        gauge, counter = self._engine_gauge, self._engine_counter
        self.running = gauge("num_requests_running", "Sequences that the engine computes, after its last step.")
        self.waiting = self._gauge("num_requests_waiting", "Waiting requests, in the server's queue and in the engine's.")
        self.waiting_by_reason = self._gauge(
            "num_requests_waiting_by_reason",
            "Requests that wait: capacity, for room in the engine; deferred, of class batch until nothing else waits.",
            "reason",
        )
        self.queued = self._gauge("queue_requests", "Requests in the server's queue by class.", "class")
        self.queued_tokens = self._gauge("queue_prompt_tokens", "Prompt tokens in the server's queue by class.", "class")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1; reusable prefixes count as free.")
        self.cache_config = gauge(
            "cache_config_info",
            "1, with the shape of the KV cache in labels.",
            "block_size",
            "num_kv_blocks",
            "enable_prefix_caching",
            "cache_dtype",
        )
        self.adapters = self._gauge(
            "lora_requests_info",
            "With enable_lora the Unix time, and in labels, with commas between them, the adapters of requests that the engine "
            "computes and of those that wait.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        )
        self.batch_prefill = gauge("batch_prefill_tokens", "Prompt tokens in the last step.")
        self.batch_decode = gauge("batch_decode_tokens", "Decoding sequences in the last step: one token each.")
        self.engine_state = gauge("engine_state", "1 for the state the engine is in, 0 for the others.", "state")
        self.restarts = counter(
            "engine_restarts", "Times the engine process was started again after it had ended, also while it loaded."
        )
        self.preemptions = counter("num_preemptions", "Number of preempted sequences.")
        self.evicted_blocks = counter("kv_compression_evicted_blocks", "KV blocks that kv_compression of requests has evicted.")
        self.looked_runs = counter(
            "kv_compression_runs", "Runs of 16 keys of a kv head that the method bounds has looked at, on the first rank."
        )
        self.skipped_runs = counter("kv_compression_skipped_runs", "Those of them that were not read.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
        self.drafts = counter("spec_decode_num_drafts", "Number of verified drafts of sequences.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens, including those that constraints force.")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in their draft, from 0 on.", "position"
        )
        self.stage_busy = counter("pipeline_stage_busy_seconds", "Seconds in which a pipeline stage computed.", "stage")
        self.stages_active = counter("pipeline_active_seconds", "Seconds in which a step was in flight in pipeline stages.")
        self.iteration_tokens = self._engine_histogram(
            "iteration_tokens_total", "Tokens computed per step, of prompts and decoding.", ITERATION_BUCKETS
        )
        self.step_seconds = self._engine_histogram("engine_step_seconds", "Duration of one step, in the engine.", STEP_BUCKETS)

    def _define_tokens(self) -> None:
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that reached their first output token, cached ones included."
        )
        self.prompt_tokens_by_source = self._counter(
            "prompt_tokens_by_source", "The same by where they came from: local_compute or local_cache_hit.", "source"
        )
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens, as they arrive from the engine.")

    def _define_times(self) -> None:
        histogram = self._histogram
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From the arrival of an online request to its first output token at the server; includes waiting.",
            TTFT_BUCKETS,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Between two outputs of a request that have tokens: one sample per output of the engine, not per token.",
            TOKEN_BUCKETS,
        )
        self.per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean over a request: decode time / (tokens of its longest choice - 1); none for outputs of one token.",
            TOKEN_BUCKETS,
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds",
            "From the arrival of an online request to its last output, of those that had any.",
            REQUEST_BUCKETS,
        )
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "From the arrival of an online request to its first step: in the server's queue and in the engine's.",
            REQUEST_BUCKETS,
        )
        self.queue_wait = histogram(
            "queue_wait_seconds", "From admission to dispatch to the engine, by class.", REQUEST_BUCKETS, "class"
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "From the first step of a request to its first token, engine clock.",
            REQUEST_BUCKETS,
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token of a request to its end, engine clock.", REQUEST_BUCKETS
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "From the first step of a request to its end, engine clock.", REQUEST_BUCKETS
        )

    def _define_sizes(self, lengths: tuple[int, ...]) -> None:
        histogram = self._histogram
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of ended requests.", lengths)
        self.generation_length = histogram(
            "request_generation_tokens", "Output tokens of ended requests, all choices; none of embeddings.", lengths
        )
        self.longest_choice = histogram(
            "request_max_num_generation_tokens", "Output tokens of the longest choice of ended requests.", lengths
        )
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of ended requests that stated it.", lengths)
        self.params_n = histogram("request_params_n", "n of ended requests.", CHOICE_BUCKETS)
        self.computed_prompt = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, not cached, of ended requests.", lengths
        )
        self.request_preemptions = histogram("request_num_preemptions", "Preemptions of ended requests.", PREEMPTION_BUCKETS)

    def _define_ends(self) -> None:
        counter = self._counter
        self.success = counter(
            "request_success", "Choices that ended, by reason: stop, length, abort or error.", "finished_reason"
        )
        self.aborts = counter("stream_aborts", "Requests that the server ended early, by reason.", "reason")
        self.disconnects = counter(
            "client_disconnects", "Clients that disconnected before the end, by phase: queue, prefill or decode.", "phase"
        )
        self.rejections = counter(
            "admission_rejections",
            "Requests answered with an error, each once, also in a stream, by reason. Over a limit: overloaded, rate_limited, "
            "connections, body_bytes, storage; not there: engine_unavailable, draining, unavailable; the client's: invalid, "
            "unauthorized, not_found, too_large, slow_reader; deadline: body, turn or answer did not come in time; failed: "
            "the server's or its engine's fault. Lines of batches are not among them.",
            "reason",
        )
        self.slo_counted = counter(
            "slo_requests", "Ended requests that count for goodput: online ones, except those cancelled by clients."
        )
        self.slo_met = counter("slo_requests_met", "Of these, the ones that ended well within every threshold that is set.")

    def _define_ranks(self) -> None:
        """Metrics of the ranks that share a model; without samples if there is only one process."""
        gauge, counter = self._engine_gauge, self._engine_counter
        self.rank_up = gauge("rank_up", "1 for a rank that is ready, 0 for one that is not.", "rank")
        self.rank_memory = gauge("rank_resident_bytes", "Memory of a rank's process, including memory shared by ranks.", "rank")
        self.rank_share = gauge("rank_weight_share", "A rank's part of the weights, 0 to 1.", "rank")
        self.rank_calls = counter(
            "rank_collective_calls",
            "Collectives of a rank by operation; barrier: in native steps.",
            "rank",
            "operation",
        )
        self.rank_bytes = counter("rank_collective_bytes", "Bytes that a rank wrote for the others.", "rank", "operation")
        self.rank_seconds = counter(
            "rank_collective_seconds",
            "Seconds that a rank waited for others at barriers; otherwise duration of calls. On GPUs the time to launch them; "
            "none in CUDA graphs.",
            "rank", "operation",
        )  # fmt: skip
        self.rank_exposed = counter(
            "rank_collective_exposed_seconds",
            "Of these, seconds in which the rank, or its GPU, only waited: exchanges of experts may overlap with products.",
            "rank", "operation",
        )  # fmt: skip
        self.rank_waits = counter("rank_barrier_waits", "Barriers at which another rank was missing.", "rank")

    def _define_experts(self) -> None:
        """Of a mixture model; without samples where its experts are not placed on ranks, or nothing changes their load."""
        gauge, counter = self._engine_gauge, self._engine_counter
        self.expert_imbalance = gauge(
            "expert_imbalance",
            "Tokens of a layer's experts on the rank with the most, relative to its share, divided by the mean of the ranks; "
            "since its placement last changed.",
            "layer",
        )
        of_last = "Max/mean of the ranks' tokens in the window of the last rebalancing (enable_eplb), with the placement"
        self.expert_imbalance_before = gauge("expert_imbalance_before", f"{of_last} that it found.", "layer")
        self.expert_imbalance_after = gauge("expert_imbalance_after", f"{of_last} that it planned.", "layer")
        self.expert_moved_slots = counter("expert_moved_slots", "Slots that got another expert (enable_eplb).", "layer")
        self.expert_failed_moves = counter("expert_failed_moves", "Slots whose new expert could not be loaded.", "layer")
        self.expert_overflowed = counter(
            "expert_overflowed", "Choices of a full expert that went to another one (expert_capacity_factor).", "layer"
        )
        self.expert_dropped = counter(
            "expert_dropped", "Choices of a full expert that were left out (expert_capacity_factor).", "layer"
        )
        self.expert_weak = counter("expert_weak_dropped", "Choices that were left out by expert_min_share.", "layer")
        self.expert_capacity_use = gauge(
            "expert_capacity_use",
            "Demand of a step's busiest expert / its capacity (expert_capacity_factor), mean of about 100 steps.",
            "layer",
        )
        self.expert_tokens = self._engine_counter(
            "expert_tokens",
            "Tokens that a rank's experts got, in all layers, each once for each of its experts; copies divide them evenly.",
            "rank",
        )

    def _define_tiers(self) -> None:
        """Of the KV tiers on host and disk; without samples where there are none. A page is one full KV block."""
        gauge = self._engine_gauge
        self.tier_pages = gauge("kv_tier_pages", "Pages of the model in a KV tier.", "tier")
        self.tier_used_bytes = gauge("kv_tier_used_bytes", "Bytes in use in a KV tier; on disk those of all models.", "tier")
        self.tier_usage = gauge("kv_tier_usage_perc", "Share of a KV tier in use, 0 to 1.", "tier")
        counters = (
            ("num_hits", "kv_tier_hit_pages", "Pages that admitted prompts took from a KV tier."),
            ("num_saved", "kv_tier_saved_pages", "Pages saved to a KV tier."),
            ("num_loaded", "kv_tier_loaded_pages", "Pages loaded from a KV tier."),
            ("saved_bytes", "kv_tier_saved_bytes", "Bytes saved to a KV tier."),
            ("loaded_bytes", "kv_tier_loaded_bytes", "Bytes loaded from a KV tier."),
            ("save_s", "kv_tier_save_seconds", "Seconds of saving to a KV tier; of the disk, in a thread of its own."),
            ("load_s", "kv_tier_load_seconds", "Seconds of loading from a KV tier; of the disk, in a thread of its own."),
            ("num_dropped", "kv_tier_dropped_pages", "Pages worth saving that were not: the tier was busy or not writable."),
            ("num_damaged", "kv_tier_damaged_pages", "Pages that were found with other bytes than their checksum says."),
            ("num_declined", "kv_tier_declined_requests", "Requests whose pages were slower to load than to compute."),
            ("num_late", "kv_tier_late_requests", "Requests that went on before all their pages were read."),
            ("num_errors", "kv_tier_errors", "Unexpected errors in a KV tier, without which its requests went on."),
        )
        self.kv_transfers = self._engine_counter(
            "kv_transfers",
            "KV transfers by outcome; of a decode server also prompts without one, by the reason.",
            "outcome",
        )
        self.peer_transfers = self._engine_counter(
            "kv_peer_transfers", "KV transfers of a decode server that gave pages, by prefill server.", "peer"
        )
        self.peer_wait = gauge(
            "kv_peer_wait_seconds",
            "Expected seconds of the work that waits at a prefill server, as a decode server knows it.",
            "peer",
        )
        self.tier_counters = {field: self._engine_counter(name, text, "tier") for field, name, text in counters}

    def _define_server(self) -> None:
        self.http_requests = self._counter(
            "http_requests", "Answers by route and status; 499: the client had disconnected.", "route", "code"
        )
        self.http_seconds = self._histogram(
            "http_request_duration_seconds", "Whole answers by route.", REQUEST_BUCKETS, "route"
        )
        self.ignored_params = self._counter(
            "ignored_params",
            "Parameters without effect in requests; names that this server does not know are counted as other.",
            "param",
        )
        self.tool_parsers = self._counter(
            "tool_call_parser_invocations", "Outputs parsed for tool calls, by format and outcome: parsed or none.",
            "format", "outcome",
        )  # fmt: skip
        self.otlp_exports = self._counter(
            "otlp_exports", "Ended requests whose spans were sent to the OpenTelemetry collector, or dropped, by outcome.",
            "outcome",
        )  # fmt: skip
        self.batch_lines = self._gauge("batch_lines", "Lines of unfinished batches by state.", "state")
        self.loop_lag = self._histogram("event_loop_lag_seconds", "Lag of the server's event loop.", LAG_BUCKETS)

    def _define_load(self, sources: Sequence[GaugeSources]) -> None:
        counter, read_gauge = self._engine_counter, self._read_gauge
        self.flops = counter(
            "estimated_flops_per_gpu",
            "Floating point operations: two per active parameter and token, and of attention what is sure; rather too low.",
        )
        self.read_bytes = counter(
            "estimated_read_bytes_per_gpu", "Bytes read: the active weights once a step, and the keys and values attended to."
        )
        self.written_bytes = counter("estimated_write_bytes_per_gpu", "Bytes of keys and values written.")
        read_gauge(
            "engine_heartbeat_age_seconds",
            "Time since the last message of the engine's loop; none without an engine.",
            [source.heartbeat_age_s for source in sources],
        )
        read_gauge(
            "achieved_flops_per_second",
            "The same operations per second of step time, lately.",
            [source.flops_per_s for source in sources],
        )
        read_gauge(
            "achieved_bytes_per_second",
            "Bytes read per second of step time, lately.",
            [source.bytes_per_s for source in sources],
        )
        read_gauge(
            "mfu",
            "Share of the machine's peak operations per second, where that is known.",
            [source.mfu for source in sources],
        )
        read_gauge(
            "mbu", "Share of the machine's peak bytes per second, where that is known.", [source.mbu for source in sources]
        )
