"""ModelRunner: executes step plans on one device, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.base.ids import SequenceId
from quire.base.logging import get_logger
from quire.base.shared_reads import shared_reads
from quire.contracts.config import EngineConfig
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.contracts.step import Runner, StepPlan, StepResult, TokenLogprobs
from quire.kernels.peaks import SHORT, measure_peaks
from quire.kv.page_supply import PageSupply
from quire.kv.pool import KvPool
from quire.model.build import Model, build_model, effective_max_model_len, runs_natively
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.generation_defaults import read_generation_defaults
from quire.model.heads.build import find_head_kind
from quire.model.native_decoder import NativeDecoder
from quire.model.parameters import parameter_shapes
from quire.model.resolve import resolve_model
from quire.model.stored_tensors import has_weights
from quire.quant.policy import POLICIES
from quire.sampling.sampler import sample
from quire.speculate.build import build_speculator, count_drafts
from quire.speculate.memory import StepLimits
from quire.speculate.proposer import Proposer, Reads
from quire.speculate.sources import check_device_sources, settle_method
from quire.speculate.target import Target
from quire.speculate.verifier import verify
from quire.worker.constrained import LATE_WAIT_S, ConstrainedRows
from quire.worker.device.choice import choose_device
from quire.worker.device.memory import estimate_memory
from quire.worker.drafting import DraftingRunner, candidates_of, known_tokens, last_tokens, propose_drafts
from quire.worker.input_batch import NO_DRAFTS, NONE_UNASKED, InputBatch, Row, StepInput
from quire.worker.memory import check_fits, cpu_block_size, leave_room, max_num_batched_tokens, plan_memory, weight_bytes
from quire.worker.prompt_results import pool_hidden_states, prompt_logprobs
from quire.worker.sampled_results import take_best, take_matches, take_sampled, take_walks

logger = get_logger(__name__)


class EngineRunner(Runner, Protocol):
    """What the engine asks of a runner beside its steps."""

    def replace_proposer(self, config: SpeculativeConfig, make: Callable[[Proposer | None], Proposer]) -> None:
        """Let another proposer draft, made of the one that did; no sequence may be followed."""
        ...

    def pause_drafts(self, is_wanted: bool) -> None:
        """Draft nothing at all, or go on; no sequence may be followed."""
        ...

    def draft_forced(self, is_wanted: bool) -> None:
        """Say whether the tokens that constraints force are drafted; no sequence may be followed."""
        ...

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes a second that the machine reads and its operations a second, measured in a moment, now."""
        ...


def settle_drafts(config: EngineConfig) -> EngineConfig:
    """Return a configuration that says by which method tokens are drafted. Raises ConfigError."""
    drafts = config.speculative_config
    return config if drafts is None else replace(config, speculative_config=settle_method(drafts))


@shared_reads()
def inspect_model(config: EngineConfig) -> ModelReport:
    """Read what a model is and needs, without its weights, also when it would not fit.

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    config = settle_drafts(config)
    folder = resolve_model(config.model, config.revision)
    # The revision is the model's; a tokenizer from elsewhere has its own history.
    tokenizer = config.model if config.tokenizer is None or config.skip_tokenizer_init else config.tokenizer
    tokenizer_folder = folder if tokenizer == config.model else resolve_model(tokenizer, None)
    try:
        spec = read_model_spec(folder, config.dtype)
    except (ModelFormatError, UnsupportedError):
        _refuse_head(config, folder)
        raise
    if config.allow_missing_head:
        spec = tie_missing_head(folder, spec)
    shapes = parameter_shapes(spec)
    max_model_len = effective_max_model_len(spec, config.max_model_len)
    device = choose_device(config)
    if device is None:
        _check_deterministic(config, spec)
        num_bytes = weight_bytes(config, spec, shapes, folder)
        memory = plan_memory(config, spec, num_bytes, max_model_len, max_num_batched_tokens(config))
    else:
        memory = estimate_memory(config, device, spec, shapes, max_model_len, folder)
    name = "cpu" if device is None else "interpreter" if device.type == "cpu" else str(device)
    report = ModelReport(folder, tokenizer_folder, spec, shapes, memory, read_generation_defaults(folder), device=name)
    if config.speculative_config is None:
        return report
    if device is not None:
        check_device_sources(config.speculative_config, report)
        return report  # what a device has left for the cache is measured, with drafts
    drafts = count_drafts(config.speculative_config, report, _step_limits(config))
    return replace(report, memory=leave_room(config, memory, drafts))


def check_weights(report: ModelReport) -> bool:
    """Check the names, shapes and dtypes of the stored weights and the sizes of their files, without reading values.

    Returns whether any weights are stored. Raises ModelFormatError.
    """
    if not has_weights(report.folder):
        return False
    open_parameters(report.folder, report.spec)
    return True


def _check_deterministic(config: EngineConfig, spec: ModelSpec) -> None:
    if config.deterministic and not runs_natively(spec, cpu_block_size(config)):
        raise ConfigError(
            "deterministic needs the native kernels of the CPU, which do not run this model here: leave it out, or see the log "
            "for why they do not"
        )


def _step_limits(config: EngineConfig) -> StepLimits:
    return StepLimits(config.max_num_seqs, max_num_batched_tokens(config))


def _refuse_head(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError for a folder that cannot be read as a model because it holds a head."""
    kind = find_head_kind(folder)
    if kind is not None:
        given = f'{{"method": "{kind}", "model": "{config.model}"}}'
        raise ConfigError(
            f"{config.model} is no model, but a head that drafts for one: give the model that it was trained for, and the head "
            f"as speculative_config {given}"
        ) from None


@shared_reads()
def build_runner(config: EngineConfig) -> tuple[EngineRunner, ModelReport]:
    """Plan the memory, load the weights and allocate the KV pool."""
    config = settle_drafts(config)
    report = inspect_model(config)
    try:
        return _build_runner(config, report)
    except ModelFormatError:
        _refuse_head(config, report.folder)
        raise


def _build_runner(config: EngineConfig, report: ModelReport) -> tuple[EngineRunner, ModelReport]:
    device = choose_device(config)
    if device is not None:
        from quire.worker.device.build import build_device_runner  # needs Triton

        return build_device_runner(config, device, report, max_num_batched_tokens(config, report.device))
    check_fits(report.memory)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    for line in report.memory.describe().splitlines():
        logger.info(line)
    parameters = open_parameters(report.folder, report.spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    decoder = build_model(report.spec, parameters, report.memory.max_model_len, cpu_block_size(config), policy)
    if isinstance(decoder, NativeDecoder):
        report = replace(report, packed_weight_bytes=decoder.weight_bytes, spared_weight_bytes=decoder.spared_bytes)
    runner = ModelRunner(decoder, report.memory, config.max_num_seqs)
    if config.speculative_config is not None:
        runner.draft_with(build_speculator(config.speculative_config, report, runner.target, _step_limits(config)))
    runner.take_pages()
    return runner, report


class ModelRunner(DraftingRunner):
    """Runs the model over the plans of one scheduler; implements contracts.step.Runner.

    What a constraint forces is drafted, and verified; more only if there is a speculator that drafts, see draft_with.
    """

    def __init__(self, decoder: Model, memory: MemoryPlan, max_num_seqs: int) -> None:
        super().__init__(decoder.spec.vocab_size, decoder.keep_inputs)
        self._decoder = decoder
        self._kv = KvPool(memory.kv, memory.num_kv_blocks)
        self._pages = PageSupply(self._kv)  # see take_pages
        # No sequence holds more blocks than the pool has, however long the model would let it become.
        max_blocks = min(-(-memory.max_model_len // memory.kv.block_size), memory.num_kv_blocks)
        self._batch = InputBatch(max_num_seqs, max_blocks, memory.kv.block_size, decoder.spec.vocab_size)
        self._constrained = ConstrainedRows()
        # Nothing asks for gradients here; torch is spared to look out for some, where it is what computes.
        self._inference = nullcontext() if isinstance(decoder, NativeDecoder) else torch.inference_mode()

    def take_pages(self) -> None:
        """Take pages for its pools ahead, those of what drafts among them, which is there by then."""
        self._pages = PageSupply(self._kv, *self._speculator.pools)
        self._pages.start()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner."""
        self._pages.begin_step(plan)
        try:
            with self._inference:
                return self._execute(plan)
        finally:
            self._pages.end_step()

    def _execute(self, plan: StepPlan) -> StepResult:
        self._constrained.forget(plan.ended)
        self._batch.apply(plan)
        if plan.block_copies:
            self._kv.copy_blocks(plan.block_copies)
        is_napping = self._speculator.naps(plan)
        drafts = NO_DRAFTS if is_napping else propose_drafts(self._speculator, self._batch, plan)
        if not plan.num_scheduled_tokens:
            return StepResult(plan.step_id, {}, {}, {}, {}, caught_up=self._constrained.take_caught_up(LATE_WAIT_S))
        step = self._batch.build(plan, drafts, self._speculator.count_unasked(drafts) if drafts else NONE_UNASKED)
        rows, reads = step.ready, () if is_napping else self._speculator.reads
        has_prompt_logprobs = step.wants_prompt and any(row.num_prompt_logprobs is not None for row in step.rows)
        keeps_all = has_prompt_logprobs or "final" in reads
        pooled_runs = step.pooled_rows() if step.wants_prompt else []
        hidden_rows = [index for run in pooled_runs for index in range(run.first, run.last)]
        masks = self._constrained.start(rows, drafts, len(step.rows))
        logits, best = self._decoder.run(
            step.runs,
            self._kv,
            step.logit_rows,
            hidden_rows,
            keeps_all=keeps_all,
            wants_best=all(row.sampling.is_plain for row in rows),
            needs_logits=bool(drafts) and (self._speculator.typical is not None or self._speculator.observes),
        )
        late = masks.wait()
        if best is not None and min(best, default=0) < 0:
            best = None  # the sampler says what is wrong with the logits
        found_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        if has_prompt_logprobs:
            found_logprobs = prompt_logprobs(step, self._decoder.spec.vocab_size, self._decoder.logits_at)
        self._batch.advance(step)
        paths: dict[SequenceId, tuple[int, ...]] = {}
        sampled = logits
        if late:
            rows, kept = self._batch.leave_out(step, late)
            sampled = logits[kept]
        if drafts and best is not None and self._speculator.typical is None and step.runs.trees is None:
            result = take_matches(plan.step_id, step, best, found_logprobs, paths)
        elif drafts:
            walks = verify(sampled, candidates_of(rows, step, masks), self._speculator.typical, best)
            result = take_walks(plan.step_id, self._batch, step, rows, walks, found_logprobs, paths)
            moves = self._batch.take_moves()
            if moves is not None:
                self._decoder.move_tokens(self._kv, *moves)
        else:
            result = self._sample(plan, rows, sampled, best, found_logprobs)
            paths = {} if is_napping else dict.fromkeys(result.sampled, ())
        for what in reads:
            self._feed(what, step, paths, late, keeps_all)
        if not is_napping:
            if self._speculator.observes:
                self._speculator.observe(paths, [row.start.sequence_id for row in step.ready], logits)
            result.draft_wishes.update(self._speculator.end(plan, paths))
        if pooled_runs:
            pooled, errors = pool_hidden_states(pooled_runs, self._decoder.hidden_states)
            result = replace(result, pooled=pooled, errors={**result.errors, **errors})
        caught_up = self._constrained.take_caught_up()
        return replace(result, late=late, caught_up=caught_up) if late or caught_up else result

    def _sample(
        self,
        plan: StepPlan,
        rows: list[Row],
        logits: torch.Tensor,
        best: list[int] | None,
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]],
    ) -> StepResult:
        """Sample the next token of every sequence whose known tokens are all computed; best: those, where they are known."""
        if best is not None:
            return take_best(plan.step_id, rows, best, prompt_logprobs)
        outcomes = sample(logits, [row.sampling for row in rows]) if rows else []
        return take_sampled(plan.step_id, rows, outcomes, prompt_logprobs)

    def _feed(
        self,
        what: Reads,
        step: StepInput,
        paths: Mapping[SequenceId, tuple[int, ...]],
        late: Set[SequenceId],
        has_kept_all: bool,
    ) -> None:
        """Hand the proposer what it reads of the tokens that this step computed: the known ones and the accepted drafts.

        The last known ones of late sequences are computed once more, and handed over then.
        """
        if what == "last":
            fed, places = last_tokens(step, paths)
            if fed:
                rows = [step.logit_rows[place] for place in places] if has_kept_all else places
                self._speculator.feed(what, fed, self._decoder.final_states(rows))
            return
        fed, rows = known_tokens(step, paths, late)
        features = self._decoder.layer_inputs(rows) if what == "layers" else self._decoder.final_states(rows)
        self._speculator.feed(what, fed, features)

    @property
    def target(self) -> Target:
        """The model and its cache, for who drafts with them."""
        return Target(self._decoder, self._kv)

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes a second that this machine reads and its operations a second, measured in a moment, now."""
        peaks = measure_peaks(report, SHORT)
        return peaks.bytes_per_s, peaks.flops_per_s

    def close(self) -> None:
        """Release the weights and the KV pool."""
        self._constrained.close()
        self._pages.close()
        del self._decoder, self._kv, self._keep_inputs
