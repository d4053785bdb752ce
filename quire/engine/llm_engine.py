"""LLMEngine: the step loop. It takes requests, advances them in steps, and returns outputs."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from quire.base.errors import ConfigError, RequestError, WorkerError
from quire.base.ids import RequestId
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.contracts.outputs import EmbeddingRequestOutput, RequestOutput
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.contracts.sleep import SleepLevel, check_sleep_arguments
from quire.contracts.step import StageTimes, StepPlan, StepResult
from quire.contracts.tier_stats import TierStats
from quire.contracts.timeline import RequestTimeline, TimelineKind
from quire.engine.adapters import AdapterRegistry
from quire.engine.compiling import CompilingRequests, grammar_use
from quire.engine.config import make_config
from quire.engine.disk_tier import host_tier_stats, open_disk_tier
from quire.engine.embedding_output import EmbeddingStream
from quire.engine.engine_stats import EngineStats
from quire.engine.interrupts import Interrupts
from quire.engine.kv_transfer import open_transfer, read_transfer_options
from quire.engine.launched import exit_if_worker, failures_reported
from quire.engine.loading import load_runner_and_tokenizer, vocabulary_of
from quire.engine.output import OutputKind, OutputStream
from quire.engine.replica_setup import replica_setups
from quire.engine.request_factory import PromptLike, RequestFactory, RequestRules
from quire.engine.scheduler_config import make_scheduler_config
from quire.engine.scheduling.admission import check_servable
from quire.engine.scheduling.events import SequenceUpdate
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.scheduling.step_loop import StepLoop
from quire.engine.scheduling.step_record import StepRecord
from quire.engine.scheduling.timeline import TimelineRecorder
from quire.engine.sleeping_runner import SleepingRunner
from quire.grammar.compiler import Compilation, GrammarCompiler
from quire.speculate.speculator import Speculator
from quire.worker.expert_parallel import save_expert_load
from quire.worker.inspect import settle_drafts
from quire.worker.step_driver import EngineRunner
from quire.worker.tiers import page_bytes

logger = get_logger(__name__)


_COMPILE_WAIT_S = 0.005
"""How long an idle step waits for a constraint; the caller of `step` may have to handle commands."""

_CLOSE_SAVE_S = 5.0
"""How long `close` goes on saving cached blocks to the disk tier; what is not written by then is dropped."""

EngineOutput = RequestOutput | EmbeddingRequestOutput
"""The outputs of a step; EmbeddingRequestOutput for requests with PoolingParams."""


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
        with failures_reported(config):
            config = settle_drafts(replica_setups(config)[0].config)
            transfer_options = read_transfer_options(config)
            runner, report, tokenizer = load_runner_and_tokenizer(config)
        # The objects so far are permanent: exclude them from garbage collection.
        gc.freeze()
        self.config = config
        self.report = report
        self.windows = tuple(dict.fromkeys(layer.attention.window for layer in report.spec.layers))
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(make_scheduler_config(config, report))
        self.held_runner = SleepingRunner(config, runner, report)
        self._wanted_sleep: SleepLevel | None = None
        self.step_loop = StepLoop(
            self.scheduler, runner, self._commit, is_ahead=config.async_scheduling is not False, windows=self.windows
        )
        self._factory = RequestFactory(RequestRules.of(report, config), tokenizer)
        self.streams: dict[str, OutputStream | EmbeddingStream] = {}
        self.grammars = GrammarCompiler(lambda: vocabulary_of(tokenizer, report.spec.vocab_size))
        self._compiling = CompilingRequests()
        self._adapters = AdapterRegistry(runner.adapters, config.max_loras)
        try:
            self.transfer = open_transfer(
                config, report, transfer_options, runner.host_slab, self.scheduler, self._factory.check
            )
        except BaseException:
            runner.close()
            raise
        self.prefill, self.remote_prefill = self.transfer.prefill, self.transfer.remote
        self.disk_tier = open_disk_tier(config, report, runner.host_slab, self.scheduler)
        self._step_started_s = 0.0
        self._request_indices = itertools.count()
        self._undelivered: list[EngineOutput] = []
        self._is_closed = False
        self.interrupts = Interrupts()
        held = self.held_runner
        self.stats = EngineStats(read_ranks=held.rank_stats, read_tiers=self._tier_stats, read_experts=held.expert_stats)

    @property
    def is_recording(self) -> bool:
        """Whether last_step is wanted."""
        return self.step_loop.is_recording

    @is_recording.setter
    def is_recording(self, is_wanted: bool) -> None:
        self.step_loop.is_recording = is_wanted

    @property
    def records_timelines(self) -> bool:
        """Whether the last output of a request has a timeline in its metrics. Set it between requests."""
        return self.scheduler.timelines is not None

    @records_timelines.setter
    def records_timelines(self, is_wanted: bool) -> None:
        if is_wanted == self.records_timelines:
            return
        host = self.scheduler.kv.host_tier
        self.scheduler.timelines = TimelineRecorder(None if host is None else host.stats) if is_wanted else None

    @property
    def last_step(self) -> StepRecord | None:
        """The last step that was committed; None if none is recorded."""
        return self.step_loop.last_step

    def prompt_limit(self, params: PoolingParams) -> int | None:
        """Return how many tokens of a prompt truncate_prompt_tokens keeps, None: all. Raises RequestError."""
        return self._factory.prompt_limit(params.truncate_prompt_tokens)

    def make_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams | None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Tokenise and validate without adding; raises RequestError. May be called from other threads."""
        params = self.default_sampling_params() if params is None else params
        return self._factory.make(request_id, next(self._request_indices), prompt, params, lora_request)

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams | None = None,
        output_kind: OutputKind = "cumulative",
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request; without params with the checkpoint's sampling defaults.

        With PoolingParams it has one output, an EmbeddingRequestOutput, whatever the output_kind. Raises RequestError, naming
        the field, when it is invalid or can never fit.

        A constraint (structured_outputs, bad_words) is compiled while other requests run. If it cannot be compiled, nothing is
        raised here, even if that is already known from an earlier request: `step` returns an output with finish_reason "error",
        the reason in `error` and the field in `error_param`. `LLM` and `AsyncLLM` wait for the compilation and raise
        RequestError; a server answers 400.
        """
        self.submit(self.make_request(request_id, prompt, params, lora_request), output_kind)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; return False if it is loaded already.

        Requests load theirs by themselves: this finds out early whether it can be loaded. Raises RequestError, and ConfigError
        while the engine is asleep.
        """
        _ = self.runner
        self._factory.check_lora(lora_request)
        return self._adapters.add(lora_request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Unload a LoRA adapter, as soon as no request uses it; return whether it was loaded."""
        return self._adapters.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the LoRA adapters in memory."""
        return {lora.lora_int_id for lora in self._adapters.loaded}

    def check_request(self, request: Request) -> None:
        """Raise RequestError if a request that was made elsewhere does not match the model or the engine's options."""
        self._factory.check(request)

    def submit(self, request: Request, output_kind: OutputKind = "cumulative") -> None:
        """Queue a request made by make_request. Raises RequestError when it can never fit or its id is in use.

        See `add_request` for constraints that cannot be compiled.
        """
        if self._is_closed:
            raise WorkerError("the engine has been closed")
        if self._wanted_sleep is not None or self.is_sleeping:
            raise WorkerError("the engine is asleep: call wake_up (POST /wake_up) first")
        is_pooled = request.pooling is not None
        if request.request_id in self.streams:
            raise RequestError(f"request_id {request.request_id!r} is in use by an unfinished request", "request_id")
        check_servable(request, self.scheduler.config)
        compilation = self.start_compilation(request)
        if compilation is not None and compilation.is_done and not compilation.has_failed:
            request, compilation = replace(request, grammar=compilation.result()), None
        stream = EmbeddingStream(request) if is_pooled else OutputStream(request, self.tokenizer, output_kind)
        if isinstance(stream, OutputStream) and request.output_token_ids:
            stream.resume()
        with self.interrupts.deferred():
            if compilation is None:
                self._add(request)
            else:
                self._compiling.add(request, compilation)
                self._note_hold(request, "compile")
            self.streams[request.request_id] = stream

    def _add(self, request: Request) -> None:
        """Pass a request to the scheduler, or hold it until its adapter has room, and its pages are read from the disk tier or
        computed elsewhere."""
        if request.lora is not None and not request.adapter_key:
            admitted = self._adapters.admit(request)
            if admitted is None:
                return
            request = admitted
        if self.disk_tier is not None and self.disk_tier.begin(request):
            self._note_hold(request, "disk_read")
        else:
            self._add_read(request)

    def _add_read(self, request: Request) -> None:
        """The same for a request for which nothing is read from the disk tier any more."""
        if self.remote_prefill is not None and self.remote_prefill.begin(request):
            self._note_hold(request, "transfer")
        else:
            self.scheduler.add(request, time.monotonic())

    def _note_hold(self, request: Request, kind: TimelineKind) -> None:
        if self.scheduler.timelines is not None:
            self.scheduler.timelines.hold(request.request_id, kind)

    def timeline_of(self, request_id: str) -> RequestTimeline | None:
        """Return the timeline of an unfinished request so far; None if there is none, or timelines are not recorded."""
        timelines = self.scheduler.timelines
        return None if timelines is None else timelines.peek(RequestId(request_id))

    def _note_end(self, stream: OutputStream | EmbeddingStream, now: float) -> None:
        stream.note_end(now)
        if self.scheduler.timelines is not None:
            stream.metrics.timeline = self.scheduler.timelines.take(stream.request.request_id)

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
        return self._wanted_sleep is not None or self._has_work

    @property
    def _has_work(self) -> bool:
        return (
            self.scheduler.has_unfinished
            or bool(self._undelivered)
            or bool(self._compiling)
            or self._is_loading
            or self._adapters.has_waiting
            or (self.prefill is not None and self.prefill.has_work)
            or not self.step_loop.is_drained
        )

    @property
    def _is_loading(self) -> bool:
        return bool(self.disk_tier) or bool(self.remote_prefill)

    def num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self.streams)

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
        if self._wanted_sleep is not None and not self._has_work:
            self._fall_asleep(self._wanted_sleep)
        return outputs

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine is asleep."""
        return self.held_runner.level is not None

    @property
    def sleep_level(self) -> SleepLevel | None:
        """The level of the engine's sleep; None: it is awake."""
        return self.held_runner.level

    def check_sleep(self, level: SleepLevel) -> None:
        """Raise UnsupportedError if this engine cannot sleep at a level."""
        self.held_runner.check(level)

    def begin_sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Take no more requests, and fall asleep when none is left; `step` has to be called until is_sleeping is True.

        level  1: the KV cache is freed, and weights on a GPU are moved to host memory. 2: weights are dropped, and read from
               the checkpoint again by wake_up
        mode   "abort": unfinished requests end now; `step` returns their last outputs, with finish_reason "abort". "wait": they
               are finished first

        The prefix cache is emptied; what the KV tiers hold stays. Without an effect if the engine sleeps at this level or a
        higher one. Raises RequestError for other arguments, and UnsupportedError if this engine cannot sleep so.
        """
        wanted, how = check_sleep_arguments(level, mode)
        self.held_runner.check(wanted)
        if wanted <= (self.held_runner.level or 0):
            return
        self._wanted_sleep = wanted
        if how == "abort":
            for request_id in list(self.streams):
                output = self.abort_request(request_id)
                if output is not None:
                    self._undelivered.append(output)

    @property
    def runner(self) -> EngineRunner:
        """What runs the steps. Raises ConfigError while the engine is asleep."""
        return self.held_runner.loaded

    def _fall_asleep(self, level: SleepLevel) -> None:
        self._wanted_sleep = None
        if not self.is_sleeping:
            while self.save_pages():
                pass
            self.step_loop.move_pages()
            self.scheduler.reset_cache()
        if level == 2:
            self.step_loop.use_runner(None)
            self._adapters = AdapterRegistry(None, self.config.max_loras)
        with self.interrupts.deferred():
            self.held_runner.sleep(level)

    def wake_up(self) -> None:
        """Load what sleeping released, and take requests again. Without an effect while the engine is awake.

        Raises ModelFormatError or ConfigError if the model cannot be loaded; the engine then stays asleep.
        """
        self._wanted_sleep = None
        with self.interrupts.deferred():
            if self.held_runner.wake_up():
                self.scheduler.forget_ended()
                self.step_loop.use_runner(self.runner)
                self._adapters = AdapterRegistry(self.runner.adapters, self.config.max_loras)

    def _step(self) -> None:
        self._admit_compiled()
        self._admit_adapted()
        self._admit_loaded()
        if self.prefill is not None:
            self.prefill.advance()
        self._step_started_s = time.monotonic()
        self.step_loop.run()
        if self.prefill is not None:
            if not self.scheduler.has_unfinished:
                self.step_loop.move_pages()
            self.prefill.advance()

    def _admit_adapted(self) -> None:
        """Pass on requests that waited until there was room for their adapter; end those whose adapter cannot be loaded."""
        if not self._adapters.has_waiting:
            return
        for request, error in self._adapters.take_ready():
            if error is None:
                self._add(request)
            else:
                self._refuse(request.request_id, error)

    def _admit_loaded(self) -> None:
        """Pass requests to the scheduler whose pages were loaded, or are not worth waiting for."""
        if self._is_loading and not self.scheduler.has_unfinished and not self._undelivered and self.step_loop.is_drained:
            (self.disk_tier or self.remote_prefill).wait(_COMPILE_WAIT_S)  # pyright: ignore[reportOptionalMemberAccess]
        if self.disk_tier is not None:
            for request in self.disk_tier.take_ready(time.monotonic()):
                self._admit(self._add_read, request)
        if self.remote_prefill is not None:
            for request in self.remote_prefill.take_ready(time.monotonic()):
                self._admit(lambda ready: self.scheduler.add(ready, time.monotonic()), request)

    def _admit(self, add: Callable[[Request], object], request: Request) -> None:
        try:
            add(request)
        except RequestError as error:
            self._refuse(request.request_id, error)

    def save_pages(self) -> bool:
        """Save cached KV blocks that no tier has, while the engine is idle; return whether there may be more."""
        if self.scheduler.kv.host_tier is None or self.config.kv_save == "none" or self.has_unfinished_requests():
            return False
        if self.is_sleeping:
            return False
        if self.disk_tier is not None:
            self.disk_tier.take_ready(time.monotonic())
            if self.disk_tier.is_behind:
                return False
        with self.interrupts.deferred():
            return self.step_loop.save_pages()

    def _admit_compiled(self) -> None:
        """Pass requests with compiled constraints to the scheduler; end those whose constraint failed to compile."""
        if not self._compiling:
            return
        if not self.scheduler.has_unfinished and not self._undelivered and self.step_loop.is_drained:
            self._compiling.wait(_COMPILE_WAIT_S)
        for request, compilation in self._compiling.take_done():
            self._admit(lambda one, done=compilation: self._add(replace(one, grammar=done.result())), request)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        stream = self.streams.pop(request_id)
        self._adapters.release(stream.request)
        stream.fail(str(error), error.param)
        self._note_end(stream, time.monotonic())
        output = stream.take()
        if output is not None:
            self._undelivered.append(output)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        now = time.monotonic()
        self.stats.num_steps += 1
        self.stats.num_batched_tokens += plan.num_tokens
        for num_drafts, num_accepted in result.verified.values():
            self.stats.note_verified(num_drafts, num_accepted)
        if self.disk_tier is not None:  # before the scheduler gives the slots that the step has saved to other pages
            self.disk_tier.note_step(plan, result, now - self._step_started_s)
        self._undelivered += self._collect(self.scheduler.commit(plan, result, now), now)
        if self.remote_prefill is not None:
            self.remote_prefill.note_step(plan, result, now - self._step_started_s)

    def _collect(self, updates: Iterable[SequenceUpdate], now: float) -> list[EngineOutput]:
        touched: dict[str, OutputStream | EmbeddingStream] = {}
        for update in updates:
            if self.prefill is not None and self.prefill.owns(update.request_id):
                self.prefill.note_update(update)
                continue
            stream = touched[update.request_id] = self.streams[update.request_id]
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
                self._note_end(stream, now)
                del self.streams[request_id]
                self._adapters.release(stream.request)
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
            stream = self.streams.get(request_id)
            is_aside = (
                self._compiling.remove(request_id)
                or self._adapters.remove_waiting(request_id)
                or any(part is not None and part.remove(request_id) for part in (self.disk_tier, self.remote_prefill))
            )
            if stream is not None and is_aside:
                left += self._end_compiling(stream)
            elif stream is not None:
                left += self._collect(self.scheduler.abort(stream.request.request_id), time.monotonic())
        return left[-1] if left and left[-1].finished else None

    def _end_compiling(self, stream: OutputStream | EmbeddingStream) -> list[EngineOutput]:
        """End a request that the scheduler does not know yet."""
        del self.streams[stream.request.request_id]
        self._adapters.release(stream.request)
        stream.abort()
        self._note_end(stream, time.monotonic())
        output = stream.take()
        return [] if output is None else [output]

    def draft_forced(self, is_wanted: bool) -> None:
        """Set whether tokens that constraints force are drafted (the default); for measurements, between requests."""
        if self.has_unfinished_requests():
            raise ConfigError("draft_forced needs an engine without unfinished requests")
        self.runner.speculator.drafts_forced = is_wanted

    @property
    def speculator(self) -> Speculator:
        """The source of drafts."""
        return self.runner.speculator

    def use_speculator(self, speculator: Speculator) -> None:
        """Draft with another speculator from now on, made by `with_proposer` of the present one; for measurements,
        between requests. The previous one may be used again later."""
        if self.has_unfinished_requests():
            raise ConfigError("use_speculator needs an engine without unfinished requests")
        self.runner.use_speculator(speculator)

    def measure_peaks(self) -> tuple[float, float]:
        """Measure and return the bytes per second that this machine reads and its operations per second. Takes a moment."""
        return self.runner.measure_peaks(self.report)

    def check_health(self) -> None:
        """Raise DeviceLostError, with the reason, if a process that runs a part of the model has ended."""
        self.held_runner.check_health()

    def rebalance_experts(self) -> bool:
        """Begin to move experts between ranks by the load of the last steps; they move between the next steps, and each move
        is logged. False: they are being moved already, or there is no thread for it. Raises ConfigError without enable_eplb."""
        return self.runner.rebalance_experts()

    @property
    def stage_times(self) -> StageTimes | None:
        """The busy and idle time of each pipeline stage so far; None without pipeline stages."""
        return self.held_runner.stage_times

    def _tier_stats(self) -> list[TierStats]:
        host = self.scheduler.kv.host_tier
        if host is None:
            return []
        found = [host_tier_stats(host, self.held_runner.host_slab, page_bytes(self.report.memory))]
        return [*found, *([] if self.disk_tier is None else [self.disk_tier.tier_stats()]), *self.transfer.tier_stats()]

    def close(self) -> None:
        """Abort unfinished requests and release the memory; the engine takes no more requests. May be called again."""
        for request_id in list(self.streams):
            self.abort_request(request_id)
        self._undelivered.clear()
        if not self._is_closed and self.disk_tier is not None:
            self.step_loop.drain()
            deadline_s = time.monotonic() + _CLOSE_SAVE_S
            while time.monotonic() < deadline_s and (self.save_pages() or self.disk_tier.wait_written()):
                pass
        if not self._is_closed:
            self._is_closed = True
            self.step_loop.drain()
            for part in (self.prefill, self.remote_prefill):
                if part is not None:
                    part.close()
            if self.config.save_expert_load is not None:
                save_expert_load(self.config.save_expert_load, self.stats.experts)
            if self.disk_tier is not None:
                self.disk_tier.close()
            self.grammars.close()
            self.held_runner.close()
