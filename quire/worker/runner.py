"""ModelRunner: executes step plans on one device, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quire.base.ids import SequenceId
from quire.base.logging import get_logger
from quire.base.shared_reads import shared_reads
from quire.contracts.config import EngineConfig
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.grammar.masks import MaskFiller
from quire.kernels.peaks import SHORT, measure_peaks
from quire.kv.pool import KvPool
from quire.model.build import Model, build_model, effective_max_model_len
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
from quire.model.generation_defaults import read_generation_defaults
from quire.model.parameters import parameter_shapes
from quire.model.resolve import resolve_model
from quire.quant.policy import POLICIES
from quire.sampling.logprobs import token_logprobs
from quire.sampling.sampler import sample
from quire.speculate.build import build_speculator
from quire.speculate.draft import Draft, DraftedSequence
from quire.speculate.speculator import Speculator
from quire.speculate.target import Target
from quire.speculate.verifier import Candidate, verify
from quire.worker.constrained import ConstrainedRows
from quire.worker.input_batch import InputBatch, PooledRun, Row, StepInput
from quire.worker.memory import MAX_LOGIT_ELEMENTS, check_fits, plan_memory, weight_bytes

logger = get_logger(__name__)

_NO_DRAFT = Draft()
_DEFAULT_BATCHED_TOKENS = 2048


def max_num_batched_tokens(config: EngineConfig) -> int:
    """Return the token budget of a step."""
    return config.max_num_batched_tokens or max(_DEFAULT_BATCHED_TOKENS, config.max_num_seqs)


@shared_reads()
def inspect_model(config: EngineConfig) -> ModelReport:
    """Read what a model is and needs, without its weights, also when it would not fit.

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    folder = resolve_model(config.model, config.revision)
    # The revision is the model's; a tokenizer from elsewhere has its own history.
    tokenizer = config.model if config.tokenizer is None or config.skip_tokenizer_init else config.tokenizer
    tokenizer_folder = folder if tokenizer == config.model else resolve_model(tokenizer, None)
    spec = read_model_spec(folder, config.dtype)
    shapes = parameter_shapes(spec)
    max_model_len = effective_max_model_len(spec, config.max_model_len)
    num_bytes = weight_bytes(config, spec, shapes, folder)
    memory = plan_memory(config, spec, num_bytes, max_model_len, max_num_batched_tokens(config))
    return ModelReport(folder, tokenizer_folder, spec, shapes, memory, read_generation_defaults(folder))


@shared_reads()
def build_runner(config: EngineConfig) -> tuple[ModelRunner, ModelReport]:
    """Plan the memory, load the weights and allocate the KV pool."""
    report = inspect_model(config)
    check_fits(report.memory)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    for line in report.memory.describe().splitlines():
        logger.info(line)
    parameters = open_parameters(report.folder, report.spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    decoder = build_model(report.spec, parameters, report.memory.max_model_len, config.block_size, policy)
    runner = ModelRunner(decoder, report.memory, config.max_num_seqs, max_num_batched_tokens(config))
    if config.speculative_config is not None:
        runner.draft_with(build_speculator(config.speculative_config, report, runner.target))
    return runner, report


class ModelRunner:
    """Runs the model over the plans of one scheduler; implements contracts.step.Runner.

    What a constraint forces is drafted, and verified; more only if there is a speculator that drafts, see draft_with.
    """

    def __init__(self, decoder: Model, memory: MemoryPlan, max_num_seqs: int, max_num_tokens: int) -> None:
        self._decoder = decoder
        self._speculator = Speculator(None, None, decoder.spec.vocab_size)
        self._kv = KvPool(memory.kv, memory.num_kv_blocks)
        # No sequence holds more blocks than the pool has, however long the model would let it become.
        max_blocks = min(-(-memory.max_model_len // memory.kv.block_size), memory.num_kv_blocks)
        self._batch = InputBatch(max_num_seqs, max_num_tokens, max_blocks, memory.kv.block_size, decoder.spec.vocab_size)
        self._masks = MaskFiller()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner."""
        self._batch.apply(plan)
        if plan.block_copies:
            self._kv.copy_blocks(plan.block_copies)
        drafts = self._propose(self._speculator, plan)
        if not plan.num_scheduled_tokens:
            return StepResult(plan.step_id, {}, {}, {}, {})
        step = self._batch.build(plan, drafts)
        ready = step.ready_rows()
        logit_rows = [last for _, last in ready]
        for row, last in ready if drafts else ():
            logit_rows += range(last + 1, last + 1 + len(drafts.get(row.start.sequence_id, ())))
        keeps_all = step.wants_prompt and any(row.num_prompt_logprobs is not None for row in step.rows)
        runs = step.pooled_rows() if step.wants_prompt else []
        hidden_rows = [index for run in runs for index in range(run.first, run.last)]
        reads_final = self._speculator.tap_layers == ()
        if reads_final:
            hidden_rows += range(step.attention.query_starts[-1])
        constrained = ConstrainedRows([row for row, _ in ready], drafts, self._masks)
        try:
            logits = self._decoder.step(
                step.token_ids,
                step.positions,
                step.attention,
                self._kv,
                logit_rows,
                keeps_all or reads_final,
                hidden_rows,
            )
        finally:
            constrained.wait()
        prompt_logprobs = self._prompt_logprobs(step) if keeps_all else {}
        pooled, errors = self._pool(runs)
        self._batch.advance(step)
        rows = [row for row, _ in ready]
        paths: dict[SequenceId, tuple[int, ...]] = {}
        if drafts:
            result = self._verify(plan, rows, _candidates(rows, drafts, constrained), logits, prompt_logprobs, paths)
        else:
            result = self._sample(plan, rows, logits, prompt_logprobs)
            paths = dict.fromkeys(result.sampled, ())
        if self._speculator.tap_layers is not None:
            self._feed(step, paths, len(hidden_rows))
        self._speculator.observe(paths, [row.start.sequence_id for row in rows], logits)
        wishes = self._speculator.end(plan, paths)
        if wishes:
            result = replace(result, draft_wishes=wishes)
        return replace(result, pooled=pooled, errors={**result.errors, **errors}) if runs else result

    def _pool(self, runs: list[PooledRun]) -> tuple[dict[SequenceId, tuple[float, ...]], dict[SequenceId, str]]:
        """Take in the hidden states of this step; return the vectors that are complete, and why some are none."""
        pooled: dict[SequenceId, tuple[float, ...]] = {}
        errors: dict[SequenceId, str] = {}
        offset = 0
        for run in runs:
            num_tokens = run.last - run.first
            run.pooler.add(self._decoder.hidden_states(offset, offset + num_tokens).numpy())
            offset += num_tokens
            if not run.is_complete:
                continue
            vector = run.pooler.result()
            if vector is None:
                errors[run.row.start.sequence_id] = "the pooled hidden state is not finite"
            else:
                pooled[run.row.start.sequence_id] = vector
        return pooled, errors

    def _sample(
        self,
        plan: StepPlan,
        rows: list[Row],
        logits: torch.Tensor,
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]],
    ) -> StepResult:
        """Sample the next token of every sequence whose known tokens are all computed."""
        sampled: dict[SequenceId, tuple[int, ...]] = {}
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        errors: dict[SequenceId, str] = {}
        completed: list[SequenceId] = []
        outcomes = sample(logits, [row.sampling for row in rows]) if rows else []
        for row, outcome in zip(rows, outcomes, strict=True):
            sequence_id = row.start.sequence_id
            row.sampling.token_mask = None
            if row.sampling.grammar_error is not None:
                errors[sequence_id] = row.sampling.grammar_error
                continue
            if outcome.token_id is None:
                errors[sequence_id] = outcome.error or "no token could be sampled"
                continue
            row.token_ids.append(outcome.token_id)
            row.sampling.append(outcome.token_id)
            sampled[sequence_id] = (outcome.token_id,)
            if row.sampling.is_grammar_complete:
                completed.append(sequence_id)
            if outcome.logprobs is not None:
                logprobs[sequence_id] = (outcome.logprobs,)
        return StepResult(plan.step_id, sampled, logprobs, prompt_logprobs, errors, completed=frozenset(completed))

    def _propose(self, speculator: Speculator, plan: StepPlan) -> Mapping[SequenceId, Draft]:
        """Return the drafts of the step."""
        speculator.begin(plan)
        for start in plan.starts:
            if start.request.pooling is None:
                row = self._batch.row(start.sequence_id)
                table = self._batch.block_table(row)
                speculator.follow(
                    DraftedSequence(start.sequence_id, start.request, start.choice, row.token_ids, row.sampling, table)
                )
        return speculator.propose(plan)

    def _feed(self, step: StepInput, paths: Mapping[SequenceId, tuple[int, ...]], num_hidden_rows: int) -> None:
        """Hand the proposer what it reads of the tokens that this step computed: the known ones and the accepted drafts."""
        rows: list[int] = []
        fed: list[tuple[SequenceId, int, int]] = []
        starts = step.attention.query_starts
        for index, row in enumerate(step.rows):
            sequence_id = row.start.sequence_id
            begin, end = starts[index], starts[index + 1]
            first_draft = end - len(step.drafts.get(sequence_id, _NO_DRAFT))
            path = paths.get(sequence_id, ())
            rows += range(begin, first_draft)
            rows += [first_draft + node for node in path]
            first = step.attention.context_lens[index] - (end - begin)
            fed.append((sequence_id, first, first_draft - begin + len(path)))
        if self._speculator.tap_layers:
            features = self._decoder.layer_inputs(rows)
        else:
            features = self._decoder.hidden_states(num_hidden_rows - starts[-1], num_hidden_rows)
            features = features if len(rows) == starts[-1] else features[rows]
        self._speculator.feed(fed, features)

    def _verify(
        self,
        plan: StepPlan,
        rows: list[Row],
        candidates: list[Candidate],
        logits: torch.Tensor,
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]],
        paths: dict[SequenceId, tuple[int, ...]],
    ) -> StepResult:
        """Sample as _sample does, and on along the drafts; `paths` gets the drafts that were accepted of every sequence."""
        result = StepResult(plan.step_id, {}, {}, prompt_logprobs, {})
        completed: list[SequenceId] = []
        for row, candidate, walk in zip(rows, candidates, verify(logits, candidates), strict=True):
            sequence_id = row.start.sequence_id
            if walk.error is not None:
                result.errors[sequence_id] = walk.error
                continue
            row.token_ids += walk.tokens
            self._batch.accept(row, walk.path)
            paths[sequence_id] = tuple(walk.path)
            if row.sampling.is_grammar_complete:
                completed.append(sequence_id)
            result.sampled[sequence_id] = tuple(walk.tokens)
            if walk.logprobs:
                result.logprobs[sequence_id] = tuple(walk.logprobs)
            if len(candidate.draft) > 0:
                result.verified[sequence_id] = (len(candidate.draft), len(walk.path))
        moves = self._batch.take_moves()
        if moves is not None:
            self._decoder.move_tokens(self._kv, *moves)
        return replace(result, completed=frozenset(completed)) if completed else result

    def _prompt_logprobs(self, step: StepInput) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
        """Return the log probabilities of the prompt tokens that follow those computed in this step."""
        found: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        max_rows = max(1, MAX_LOGIT_ELEMENTS // self._decoder.spec.vocab_size)
        for index, row in enumerate(step.rows):
            first = row.num_computed_tokens
            last = min(step.attention.context_lens[index], row.num_prompt_tokens - 1)
            num_top = row.num_prompt_logprobs
            if num_top is None or last <= first:
                continue
            offset = step.attention.query_starts[index] - first
            entries: list[TokenLogprobs] = []
            for begin in range(first, last, max_rows):
                end = min(begin + max_rows, last)
                logits = self._decoder.logits_at(offset + begin, offset + end)
                entries += token_logprobs(logits, row.token_ids[begin + 1 : end + 1], num_top)
            found[row.start.sequence_id] = tuple(entries)
        return found

    @property
    def target(self) -> Target:
        """The model and its cache, for who drafts with them."""
        return Target(self._decoder, self._kv)

    def draft_with(self, speculator: Speculator) -> None:
        """Draft with a speculator from now on; the one that was there before must follow no sequence."""
        self._speculator = speculator

    def draft_forced(self, is_wanted: bool) -> None:
        """Say whether the tokens that constraints force are drafted; no sequence may be followed."""
        self._speculator.drafts_forced = is_wanted

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes a second that this machine reads and its operations a second, measured in a moment, now."""
        peaks = measure_peaks(report, SHORT)
        return peaks.bytes_per_s, peaks.flops_per_s

    def close(self) -> None:
        """Release the weights and the KV pool."""
        self._masks.close()
        del self._decoder, self._kv


def _candidates(rows: list[Row], drafts: Mapping[SequenceId, Draft], constrained: ConstrainedRows) -> list[Candidate]:
    """Return what is to be verified, where the logits behind the drafts come after those of the rows, in their order."""
    found: list[Candidate] = []
    next_row = len(rows)
    for row in rows:
        draft = drafts.get(row.start.sequence_id, _NO_DRAFT)
        found.append(Candidate(row.start.request, row.sampling, draft, next_row, constrained.masks_of(row)))
        next_row += len(draft)
    return found
