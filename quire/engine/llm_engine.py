"""LLMEngine: the step loop. It takes requests, advances them in steps, and returns outputs."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from quire.base.errors import ConfigError, RequestError, WorkerError
from quire.base.logging import get_logger
from quire.base.shared_reads import shared_reads
from quire.contracts.config import EngineConfig, SchedulerConfig
from quire.contracts.model_spec import ModelSpec
from quire.contracts.outputs import EmbeddingRequestOutput, RequestOutput
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.rank_stats import RankStats
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.step import StageTimes, StepPlan, StepResult
from quire.contracts.tier_stats import TierStats
from quire.engine.compiling import CompilingRequests, grammar_use
from quire.engine.config import make_config
from quire.engine.disk_tier import host_tier_stats, open_disk_tier
from quire.engine.embedding_output import EmbeddingStream
from quire.engine.interrupts import Interrupts
from quire.engine.launched import exit_if_worker
from quire.engine.output import OutputKind, OutputStream
from quire.engine.replica_setup import replica_setups
from quire.engine.request_factory import PromptLike, RequestFactory, RequestRules
from quire.engine.scheduling.admission import check_servable
from quire.engine.scheduling.events import SequenceUpdate
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.step_loop import StepLoop
from quire.engine.scheduling.step_record import StepRecord
from quire.grammar.compiler import Compilation, GrammarCompiler
from quire.grammar.vocabulary import Vocabulary, read_vocabulary
from quire.speculate.speculator import Speculator
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.worker.build import build_runner
from quire.worker.inspect import inspect_model, settle_drafts
from quire.worker.memory import max_num_batched_tokens, max_state_drafts
from quire.worker.tiers import num_host_pages

logger = get_logger(__name__)


_COMPILE_WAIT_S = 0.005
"""How long an idle step waits for a constraint; the caller of `step` may have to handle commands."""

_CLOSE_SAVE_S = 5.0
"""How long `close` goes on saving cached blocks to the disk tier; what is not written by then is dropped."""

_MAX_SAVED_BYTES = 64 << 20
"""The most that one step copies to the host tier."""

EngineOutput = RequestOutput | EmbeddingRequestOutput
"""The outputs of a step; EmbeddingRequestOutput for requests with PoolingParams."""


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made: steps, and tokens computed in them.

    num_drafts           number of verifications of a sequence's drafts
    num_draft_tokens     tokens of these drafts
    num_accepted_tokens  those of them that were accepted
    accepted_per_pos     how often the first draft token was accepted, the second, and so on
    ranks                what each rank of a model on several processes does now, and has waited for; empty for one process
    tiers                what each KV tier holds and has done: host, then disk; empty without tiers
    """

    num_steps: int = 0
    num_batched_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list[int])
    read_ranks: Callable[[], list[RankStats]] = field(default=list, repr=False, compare=False)
    read_tiers: Callable[[], list[TierStats]] = field(default=list, repr=False, compare=False)

    @property
    def ranks(self) -> list[RankStats]:
        """See above; read at each access."""
        return self.read_ranks()

    @property
    def tiers(self) -> list[TierStats]:
        """See above; read anew each time."""
        return self.read_tiers()

    def note_verified(self, num_drafts: int, num_accepted: int) -> None:
        """Count the results of the drafts of one sequence in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.accepted_per_pos += [0] * (num_accepted - len(self.accepted_per_pos))
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1


class LLMEngine:
    """The producer-consumer core: add_request, then step until has_unfinished_requests is False.

    Not thread-safe: one thread adds, steps and aborts. Raises ConfigError, ModelFormatError or UnsupportedError when the
    model cannot be loaded as configured.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        """Load a model: its name and the fields of EngineConfig as options, as for LLM, or an EngineConfig."""
        if isinstance(model, EngineConfig) and options:
            raise ConfigError("give options or an EngineConfig, not both")
        config = model if isinstance(model, EngineConfig) else make_config(model=model, **options)
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size is {config.data_parallel_size}, but this runs one engine: replicas work with LLM, `quire "
                "serve` and `quire batch run`; elsewhere leave data_parallel_size at 1"
            )
        exit_if_worker(config)
        config = settle_drafts(replica_setups(config)[0].config)
        with shared_reads():
            # One of its own may be anything: it is read before the weights, which take long.
            has_own = (config.tokenizer or config.chat_template) is not None and not config.skip_tokenizer_init
            template = config.chat_template
            tokenizer = load_tokenizer(inspect_model(config).tokenizer_folder, template) if has_own else None
            runner, report = build_runner(config)
            try:
                if tokenizer is None and not config.skip_tokenizer_init:
                    tokenizer = load_tokenizer(report.tokenizer_folder, template)
            except BaseException:
                # Its threads would keep running while the process ends.
                runner.close()
                raise
        # The objects so far are permanent: exclude them from garbage collection.
        gc.freeze()
        self.config = config
        self.report = report
        self.windows = tuple(dict.fromkeys(layer.attention.window for layer in report.spec.layers))
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens(config, report.device),
                max_model_len=report.memory.max_model_len,
                block_size=report.memory.kv.block_size,
                num_kv_blocks=report.memory.num_kv_blocks,
                enable_prefix_caching=config.enable_prefix_caching and report.spec.is_causal,
                computes_whole_prompts=not report.spec.is_causal,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                policy=config.scheduling_policy,
                rope_switch_len=report.spec.rope_switch_len(report.memory.max_model_len),
                num_pipeline_stages=config.pipeline_parallel_size,
                num_state_checkpoints=report.memory.num_state_checkpoints if report.spec.has_recurrent_state else None,
                max_num_drafts=max_state_drafts(config) if report.spec.has_recurrent_state else None,
                num_host_pages=num_host_pages(config, report),
                max_page_saves=max(1, _MAX_SAVED_BYTES // max(1, report.memory.kv.bytes_per_block)),
                kv_save=config.kv_save,
            )
        )
        _log_rope_variants(report.spec, self.scheduler.config.rope_switch_len)
        self._runner = runner
        self._steps = StepLoop(
            self.scheduler, runner, self._commit, is_ahead=config.async_scheduling is not False, windows=self.windows
        )
        self._factory = RequestFactory(RequestRules.of(report, config), tokenizer)
        self._streams: dict[str, OutputStream | EmbeddingStream] = {}
        self.grammars = GrammarCompiler(lambda: _read_vocabulary(tokenizer, report.spec.vocab_size))
        self._compiling = CompilingRequests()
        self._disk = open_disk_tier(config, report, runner.host_slab, self.scheduler)
        self._step_started_s = 0.0
        self._request_indices = itertools.count()
        self._undelivered: list[EngineOutput] = []
        self._is_closed = False
        self.interrupts = Interrupts()
        self.stats = EngineStats(read_ranks=runner.rank_stats, read_tiers=self._tier_stats)

    @property
    def is_recording(self) -> bool:
        """Whether last_step is wanted."""
        return self._steps.is_recording

    @is_recording.setter
    def is_recording(self, is_wanted: bool) -> None:
        self._steps.is_recording = is_wanted

    @property
    def last_step(self) -> StepRecord | None:
        """The last step that was committed; None if none is recorded."""
        return self._steps.last_step

    def prompt_limit(self, params: PoolingParams) -> int | None:
        """Return how many tokens of a prompt truncate_prompt_tokens keeps, None: all. Raises RequestError."""
        return self._factory.prompt_limit(params.truncate_prompt_tokens)

    def make_request(self, request_id: str, prompt: PromptLike, params: SamplingParams | PoolingParams | None) -> Request:
        """Tokenise and validate without adding; raises RequestError. May be called from other threads."""
        params = self.default_sampling_params() if params is None else params
        return self._factory.make(request_id, next(self._request_indices), prompt, params)

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> None:
        """Queue a request; without params with the checkpoint's sampling defaults.

        With PoolingParams it has one output, an EmbeddingRequestOutput, whatever the output_kind. Raises RequestError, naming
        the field, when it is invalid or can never fit.

        A constraint (structured_outputs, bad_words) is compiled while other requests run. If it cannot be compiled, nothing is
        raised here, even if that is already known from an earlier request: `step` returns an output with finish_reason "error",
        the reason in `error` and the field in `error_param`. `LLM` and `AsyncLLM` wait for the compilation and raise
        RequestError; a server answers 400.
        """
        self.submit(self.make_request(request_id, prompt, params), output_kind)

    def check_request(self, request: Request) -> None:
        """Raise RequestError if a request that was made elsewhere does not match the model or the engine's options."""
        self._factory.check(request)

    def submit(self, request: Request, output_kind: OutputKind = "cumulative") -> None:
        """Queue a request made by make_request. Raises RequestError when it can never fit or its id is in use.

        See `add_request` for constraints that cannot be compiled.
        """
        if self._is_closed:
            raise WorkerError("the engine has been closed")
        is_pooled = request.pooling is not None
        if request.request_id in self._streams:
            raise RequestError(f"request_id {request.request_id!r} is in use by an unfinished request", "request_id")
        check_servable(request, self.scheduler.config)
        compilation = self.start_compilation(request)
        if compilation is not None and compilation.is_done and not compilation.has_failed:
            request, compilation = replace(request, grammar=compilation.result()), None
        stream = EmbeddingStream(request) if is_pooled else OutputStream(request, self.tokenizer, output_kind)
        with self.interrupts.deferred():
            if compilation is None:
                self._add(request)
            else:
                self._compiling.add(request, compilation)
            self._streams[request.request_id] = stream

    def _add(self, request: Request) -> None:
        """Pass a request to the scheduler, or hold it while pages are read from the disk tier for it."""
        if self._disk is None or not self._disk.begin(request):
            self.scheduler.add(request, time.monotonic())

    def start_compilation(self, request: Request) -> Compilation | None:
        """Start to compile a request's constraint and return the task, None without a constraint. `submit` does this too.

        May be called from other threads, which can wait for the result.
        """
        params = request.params
        if (params.constraint is None and not params.bad_words) or request.grammar is not None:
            return None
        use = grammar_use(request, self.config, self.scheduler.config.max_model_len)
        return self.grammars.start(params.constraint, tuple(params.bad_words or ()), use)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return the checkpoint's recommended SamplingParams (generation_config.json), changed by `overrides`."""
        return SamplingParams(**{**self.report.generation_defaults, **overrides})

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has any work left."""
        return (
            self.scheduler.has_unfinished
            or bool(self._undelivered)
            or bool(self._compiling)
            or self._is_loading
            or not self._steps.is_drained
        )

    @property
    def _is_loading(self) -> bool:
        return self._disk is not None and bool(self._disk)

    def num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def step(self) -> list[EngineOutput]:
        """Run one step and return the outputs of its requests, each in its output_kind.

        With async_scheduling the next step is launched before this one's outputs are made, so that when the last request has
        ended one step may be left, which the next call waits for; it then returns nothing.
        If all requests wait for the compilation of their constraints, it waits briefly.
        A step that fails ends its sequences with finish_reason "error"; the engine continues with the others.
        Ctrl-C is raised when the step is complete, and its outputs are returned by the next call.
        """
        with self.interrupts.deferred():
            self._step()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _step(self) -> None:
        self._admit_compiled()
        self._admit_loaded()
        self._step_started_s = time.monotonic()
        self._steps.run()

    def _admit_loaded(self) -> None:
        """Pass requests to the scheduler whose pages were read from the disk tier, or are not worth waiting for."""
        if self._disk is None:
            return
        if self._disk and not self.scheduler.has_unfinished and not self._undelivered and self._steps.is_drained:
            self._disk.wait(_COMPILE_WAIT_S)
        for request in self._disk.take_ready(time.monotonic()):
            try:
                self.scheduler.add(request, time.monotonic())
            except RequestError as error:
                self._refuse(request.request_id, error)

    def save_pages(self) -> bool:
        """Save cached KV blocks that no tier has, while the engine is idle; return whether there may be more."""
        if self.scheduler.kv.host_tier is None or self.config.kv_save == "none" or self.has_unfinished_requests():
            return False
        if self._disk is not None:
            self._disk.take_ready(time.monotonic())
            if self._disk.is_behind:
                return False
        with self.interrupts.deferred():
            return self._steps.save_pages()

    def _admit_compiled(self) -> None:
        """Pass requests with compiled constraints to the scheduler; end those whose constraint failed to compile."""
        if not self._compiling:
            return
        if not self.scheduler.has_unfinished and not self._undelivered and self._steps.is_drained:
            self._compiling.wait(_COMPILE_WAIT_S)
        for request, compilation in self._compiling.take_done():
            try:
                self._add(replace(request, grammar=compilation.result()))
            except RequestError as error:
                self._refuse(request.request_id, error)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        stream = self._streams.pop(request_id)
        stream.fail(str(error), error.param)
        stream.metrics.finished_time = time.monotonic()
        output = stream.take()
        if output is not None:
            self._undelivered.append(output)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        now = time.monotonic()
        self.stats.num_steps += 1
        self.stats.num_batched_tokens += plan.num_tokens
        for num_drafts, num_accepted in result.verified.values():
            self.stats.note_verified(num_drafts, num_accepted)
        self._undelivered += self._collect(self.scheduler.commit(plan, result, now), now)
        if self._disk is not None:
            self._disk.note_step(plan, result, now - self._step_started_s)

    def _collect(self, updates: Iterable[SequenceUpdate], now: float) -> list[EngineOutput]:
        touched: dict[str, OutputStream | EmbeddingStream] = {}
        for update in updates:
            stream = touched[update.request_id] = self._streams[update.request_id]
            try:
                self._apply(stream, update, now)
            except Exception as error:
                # An error in the text of one request must not affect others.
                logger.exception("the output of request %s failed", update.request_id)
                self.scheduler.abort(update.request_id)
                stream.fail(f"{type(error).__name__}: {error}")
        outputs: list[EngineOutput] = []
        for request_id, stream in touched.items():
            if stream.is_finished:
                stream.note_end(now)
                del self._streams[request_id]
            output = stream.take()
            if output is not None:
                outputs.append(output)
        return outputs

    def _apply(self, stream: OutputStream | EmbeddingStream, update: SequenceUpdate, now: float) -> None:
        stats = update.stats
        if stream.apply(update, now):
            ended = self.scheduler.finish(update.sequence_id, "stop")
            stats = None if ended is None else ended.stats
        if stats is not None:
            stream.add_stats(update.choice, stats)

    def abort_request(self, request_id: str) -> EngineOutput | None:
        """End a request now and return its last output (finish_reason "abort"); None if there is no such request.

        Its outputs that an interrupted step left are dropped, or returned if they were its last.
        """
        with self.interrupts.deferred():
            left = [output for output in self._undelivered if output.request_id == request_id]
            self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
            stream = self._streams.get(request_id)
            is_aside = self._compiling.remove(request_id) or (self._disk is not None and self._disk.remove(request_id))
            if stream is not None and is_aside:
                left += self._end_compiling(stream)
            elif stream is not None:
                left += self._collect(self.scheduler.abort(stream.request.request_id), time.monotonic())
        return left[-1] if left and left[-1].finished else None

    def _end_compiling(self, stream: OutputStream | EmbeddingStream) -> list[EngineOutput]:
        """End a request that the scheduler does not know yet."""
        del self._streams[stream.request.request_id]
        stream.abort()
        stream.metrics.finished_time = time.monotonic()
        output = stream.take()
        return [] if output is None else [output]

    def draft_forced(self, is_wanted: bool) -> None:
        """Set whether tokens that constraints force are drafted (the default); for measurements, between requests."""
        if self.has_unfinished_requests():
            raise ConfigError("draft_forced needs an engine without unfinished requests")
        self._runner.speculator.drafts_forced = is_wanted

    @property
    def speculator(self) -> Speculator:
        """The source of drafts."""
        return self._runner.speculator

    def use_speculator(self, speculator: Speculator) -> None:
        """Draft with another speculator from now on, made by `with_proposer` of the present one; for measurements,
        between requests. The previous one may be used again later."""
        if self.has_unfinished_requests():
            raise ConfigError("use_speculator needs an engine without unfinished requests")
        self._runner.use_speculator(speculator)

    def measure_peaks(self) -> tuple[float, float]:
        """Measure and return the bytes per second that this machine reads and its operations per second. Takes a moment."""
        return self._runner.measure_peaks(self.report)

    def check_health(self) -> None:
        """Raise DeviceLostError, with the reason, if a process that runs a part of the model has ended."""
        self._runner.check_health()

    @property
    def stage_times(self) -> StageTimes | None:
        """The busy and idle time of each pipeline stage so far; None without pipeline stages."""
        return self._runner.stage_times

    def _tier_stats(self) -> list[TierStats]:
        host = self.scheduler.kv.host_tier
        if host is None:
            return []
        found = [host_tier_stats(host, self._runner.host_slab, self.report.memory.kv.bytes_per_block)]
        return found if self._disk is None else [*found, self._disk.tier_stats()]

    def close(self) -> None:
        """Abort unfinished requests and release the memory; the engine takes no more requests. May be called again."""
        for request_id in list(self._streams):
            self.abort_request(request_id)
        self._undelivered.clear()
        if not self._is_closed and self._disk is not None:
            deadline_s = time.monotonic() + _CLOSE_SAVE_S
            while time.monotonic() < deadline_s and (self.save_pages() or self._disk.wait_written()):
                pass
        if not self._is_closed:
            self._is_closed = True
            self._steps.drain()
            if self._disk is not None:
                self._disk.close()
            self.grammars.close()
            self._runner.close()


def _log_rope_variants(spec: ModelSpec, switch_len: int | None) -> None:
    if switch_len is None:
        return
    logger.info("sequences that outgrow %d tokens are computed again, with the rope of long sequences", switch_len)
    if any(layer.attention.rope is not None and layer.attention.rope.kind == "dynamic" for layer in spec.layers):
        logger.warning(
            "the dynamic rope of sequences longer than %d tokens is that of max_model_len: their tokens can differ from "
            "those of transformers, which changes the rope with every token",
            switch_len,
        )


def _read_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> Vocabulary:
    if tokenizer is None:
        raise RequestError("constraints on outputs need a tokenizer, and the model has none", "structured_outputs")
    return read_vocabulary(tokenizer, vocab_size)
