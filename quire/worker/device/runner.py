"""DeviceRunner: executes step plans on a GPU, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from traceback import clear_frames

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import DeviceLostError, InvariantError, WorkerError
from quire.base.ids import SequenceId
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.kernels.cpu.sampling import DrawOptions, SampleStatus
from quire.kernels.triton.sampling import row_options, sample_rows
from quire.model.device_decoder import DeviceDecoder
from quire.sampling.sampler import Sampled, error_of_status, sample
from quire.speculate.proposer import Reads
from quire.speculate.speculator import Speculator
from quire.speculate.verifier import Verification, verify, verify_sampled
from quire.worker.device.block_table_updates import BlockTableUpdates
from quire.worker.device.faults import is_lost, is_out_of_memory, release_unused
from quire.worker.device.gpu_executor import GpuStepExecutor, Kept, Launched
from quire.worker.device.host_step import host_step
from quire.worker.device.memory import HOW_TO_SAVE
from quire.worker.device.peaks import measure_device_peaks
from quire.worker.device.staging import NUM_READBACKS
from quire.worker.drafting import DraftingRunner, candidates_of, known_tokens, last_tokens, propose_drafts
from quire.worker.grammar_masks import PENDING_WAIT_S, GrammarMasks, StepMasks
from quire.worker.input_batch import NO_DRAFTS, InputBatch, PooledRun, StepInput
from quire.worker.prompt_results import pool_hidden_states, prompt_logprobs
from quire.worker.sampled_results import apply_verified, expect_tokens, take_expected, take_sampled

_FINE = int(SampleStatus.FINE)


@dataclass(frozen=True, slots=True)
class _StepOnDevice:
    """A step that was launched, and what is to be done with it; implements contracts.step.LaunchedStep.

    places               indices, in their rows, of the tokens that it samples, where the device samples all of them
    left_to_host         sequences, by index, whose tokens the host samples
    has_prompt_logprobs  whether log probabilities of prompt tokens are asked for
    is_followed          whether the speculator is told how it ended
    reads                what the proposer reads of it
    """

    runner: DeviceRunner
    plan: StepPlan
    step: StepInput
    launched: Launched
    masks: StepMasks
    places: list[int]
    left_to_host: list[int]
    has_prompt_logprobs: bool
    pooled_runs: list[PooledRun]
    is_followed: bool
    reads: tuple[Reads, ...] = ()

    @property
    def allows_next(self) -> bool:
        """Whether all that is asked for is tokens, which the device keeps, and has sampled itself; drafts would follow them."""
        return self.launched.logits is None and self.launched.hidden is None and not self.is_followed

    def collect(self) -> StepResult:
        """See contracts.step.LaunchedStep."""
        return self.runner.collect(self)


class DeviceRunner(DraftingRunner):
    """Runs the model over the plans of one scheduler; implements contracts.step.AheadRunner.

    A step is launched as a whole before anything is read back. Its next tokens are sampled on the device, and stay there for
    the next step, which may be launched before they are read; where a sequence asks for more than the device's sampler knows
    (log probabilities, penalties, constraints), its logits go through the ordinary sampler, with its token drawn on the device
    all the same, and the next step has to wait for it.

    So it has to where tokens are drafted, of which the host says whether they follow: behind every draft a token is sampled on
    the device, too, and only these come back, unless a sequence asks for more.

    is_ahead        whether the next step is launched before one ends, where that is possible
    draft_steppers  what launches the steps of drafting: closed with it
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        stepper: GpuStepExecutor,
        memory: MemoryPlan,
        max_num_seqs: int,
        is_ahead: bool = True,
        draft_steppers: Sequence[GpuStepExecutor] = (),
    ) -> None:
        # What heads read is kept in every step, drafts or not: recorded steps have it in them.
        super().__init__(decoder.spec.vocab_size, lambda _: None)
        self._decoder, self._stepper, self._draft_steppers = decoder, stepper, draft_steppers
        self._block_size = memory.kv.block_size
        max_blocks = -(-memory.max_model_len // self._block_size)
        self._batch = InputBatch(max_num_seqs, max_blocks, self._block_size, decoder.spec.vocab_size)
        self._is_on_device = np.zeros(max_num_seqs, np.bool_)  # whether a line's last token is the device's own
        self._constrained = GrammarMasks()
        self._num_on_their_way = 0
        self._is_ahead, self._ready_s = is_ahead, 0.0  # when the tokens of the last step were there

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner. Raises WorkerError, which says what to lower, when memory ends, and
        DeviceLostError when the device is of no use any more."""
        return self.launch(plan).collect()

    def launch(self, plan: StepPlan) -> _StepOnDevice:
        """Start a step; see contracts.step.AheadRunner. Raises as execute does."""
        if self._num_on_their_way == NUM_READBACKS:
            raise InvariantError(f"step {plan.step_id} is launched while {NUM_READBACKS} steps are not collected")
        with self._on_device():
            launched = self._launch(plan)
        if self._is_ahead and launched.is_followed and self._num_on_their_way == 0:
            self._speculator.note_idle(time.perf_counter() - self._ready_s)
        self._num_on_their_way += 1
        return launched

    def collect(self, running: _StepOnDevice) -> StepResult:
        """Wait for a step, and take in what it found."""
        self._num_on_their_way -= 1
        with self._on_device():
            result = self._collect(running)
        if self._num_on_their_way > 0:
            self._speculator.restart_clock()
        return result

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        try:
            with torch.inference_mode(), self._decoder.on_device():
                yield
        except Exception as error:
            if is_out_of_memory(error):
                clear_frames(error.__traceback__)  # which hold the step's tensors
                release_unused(self._decoder.device)
                raise WorkerError(f"the device has not enough memory for this step: {HOW_TO_SAVE} ({error})") from error
            if is_lost(self._decoder.device):
                raise DeviceLostError(f"nothing runs on {self._decoder.device} any more in this process: {error}") from error
            raise

    def _launch(self, plan: StepPlan) -> _StepOnDevice:
        self._constrained.forget(plan.ended)
        self._batch.apply(plan)
        speculator = self._speculator
        is_napping = speculator.naps(plan)
        drafts = NO_DRAFTS if is_napping else propose_drafts(speculator, self._batch, plan)
        # Behind drafting, which may fail for want of memory: what was accepted before is to be moved all the same.
        changes = self._changes(plan)
        step = self._batch.build(plan, drafts)
        if not step.rows:
            launched = self._stepper.launch(None, "plain", changes)
            masks = self._constrained.start((), {}, 0)
            return _StepOnDevice(self, plan, step, launched, masks, [], [], False, [], False)
        has_prompt_logprobs = step.wants_prompt and any(_wants_logprobs(step, index) for index in range(len(step.rows)))
        pooled_runs = step.pooled_rows() if step.wants_prompt else []
        host = host_step(step, self._batch.tables, self._block_size, self._is_on_device)
        columns, num_ready = self._stepper.columns, len(step.ready)
        left_to_host = columns.left_to_host(host.sampled_rows[:num_ready])
        if drafts and speculator.typical is not None:
            left_to_host = list(range(num_ready))
        masks = self._constrained.start(step.ready, drafts, len(step.rows))
        kept = Kept(bool(left_to_host) or speculator.observes, has_prompt_logprobs or bool(pooled_runs))
        launched = self._stepper.launch(host, columns.sampling_of(host.sampled_rows), changes, kept)
        # From here on the rows stand behind this step, whose tokens are to come.
        self._is_on_device[host.sampled_rows] = True
        self._is_on_device[host.sampled_rows[left_to_host]] = False
        self._is_on_device[host.sampled_rows[num_ready:]] = False  # behind which draft they go on the host finds
        self._batch.advance(step)
        places: list[int] = []
        if not left_to_host and not drafts:
            expect_tokens(step.ready)
            places = host.sample_positions.tolist()
        reads = () if is_napping else speculator.reads
        asked = places, left_to_host, has_prompt_logprobs, pooled_runs, not speculator.lets_next_begin, reads
        return _StepOnDevice(self, plan, step, launched, masks, *asked)

    def _changes(self, plan: StepPlan) -> BlockTableUpdates:
        """Return what the plan changes about block tables, once the batch has taken it over."""
        entries: list[tuple[int, int, tuple[int, ...]]] = []
        for start in plan.starts:
            row = self._batch.row(start.sequence_id)
            self._stepper.columns.set(row.table, row.sampling)
            self._is_on_device[row.table] = False
            entries.append((row.table, 0, start.block_ids))
        for sequence_id, block_ids in (plan.new_block_ids or {}).items():
            row = self._batch.row(sequence_id)
            entries.append((row.table, row.num_blocks - len(block_ids), block_ids))
        for sequence_id, replaced in (plan.replaced_blocks or {}).items():
            line = self._batch.row(sequence_id).table
            entries += [(line, index, (block_id,)) for index, block_id in replaced]
        return BlockTableUpdates(entries, plan.block_copies, self._batch.take_move_lists())

    def _collect(self, running: _StepOnDevice) -> StepResult:
        plan, step, launched = running.plan, running.step, running.launched
        found = self._prompt_logprobs(step, launched.hidden) if running.has_prompt_logprobs else {}
        pooled, errors = self._pool(running.pooled_runs, launched.hidden)
        token_ids, statuses = self._stepper.take_sampled(launched)
        self._ready_s = time.perf_counter()
        late = running.masks.wait()
        failures = {index: error_of_status(SampleStatus(status)) for index, status in enumerate(statuses) if status != _FINE}
        paths: dict[SequenceId, tuple[int, ...]] = {}
        if step.drafts:
            verifications = self._verify(running, late, token_ids, failures)
            rows = self._batch.leave_out(step, late)[0] if late else step.ready
            result = apply_verified(plan.step_id, self._batch, step, rows, verifications, found, paths)
        elif running.left_to_host:
            outcomes = [
                Sampled(None, error=failures[index]) if index in failures else Sampled(token_id)
                for index, token_id in enumerate(token_ids)
            ]
            for index, outcome in self._sample_by_host(running, late):
                outcomes[index] = outcome
            rows = step.ready
            if late:
                rows, kept = self._batch.leave_out(step, late)
                outcomes = [outcomes[index] for index in kept]
            result = take_sampled(plan.step_id, rows, outcomes, found)
        else:
            result = take_expected(plan.step_id, step.ready, running.places, token_ids, failures, found)
        if running.is_followed:
            self._tell_speculator(running, result, paths if step.drafts else dict.fromkeys(result.sampled, ()), late)
        if running.pooled_runs:
            result = replace(result, pooled=pooled, errors={**result.errors, **errors})
        mask_ready = self._constrained.take_ready(0.0 if step.rows else PENDING_WAIT_S)
        return replace(result, mask_pending=late, mask_ready=mask_ready) if late or mask_ready else result

    def _tell_speculator(
        self, running: _StepOnDevice, result: StepResult, paths: dict[SequenceId, tuple[int, ...]], late: Set[SequenceId]
    ) -> None:
        speculator, logits = self._speculator, running.launched.logits
        for what in running.reads:
            self._feed(what, running, paths, late)
        if speculator.observes and logits is not None:
            speculator.observe(paths, [row.start.sequence_id for row in running.step.ready], logits)
        result.draft_requests.update(speculator.end(running.plan, paths))

    def _feed(
        self, what: Reads, running: _StepOnDevice, paths: dict[SequenceId, tuple[int, ...]], late: Set[SequenceId]
    ) -> None:
        """Hand the proposer what it reads of the step, on the device, where no other step has been launched since."""
        step = running.step
        if what == "last":
            fed, places = last_tokens(step, paths)
            rows = [step.logit_rows[place] for place in places]
        else:
            fed, rows = known_tokens(step, paths, late)
        if fed:
            self._speculator.feed(what, fed, self._decoder.features_at(rows))

    def _verify(
        self, running: _StepOnDevice, late: Set[SequenceId], token_ids: list[int], failures: dict[int, str | None]
    ) -> list[Verification]:
        """Return the next tokens of every sequence that is not late, along its draft."""
        step, logits = running.step, running.launched.logits
        candidates = candidates_of(step.ready, step, running.masks)
        on_host = self._sampled_by_host(running, late)
        left = set(running.left_to_host)
        on_device = [index for index in range(len(candidates)) if index not in left]
        found = verify_sampled(token_ids, [candidates[index] for index in on_device], on_device, failures)
        verifications = dict(zip(on_device, found, strict=True))
        if logits is not None and on_host:
            typical = self._speculator.typical
            # What is typical is found on the host, where probabilities are.
            draw = _draw if typical is None else None
            found = verify(logits, [candidates[index] for index in on_host], typical, draw=draw, rows=on_host)
            verifications.update(zip(on_host, found, strict=True))
        return [verifications[index] for index in sorted(verifications)]

    def _sampled_by_host(self, running: _StepOnDevice, late: Set[SequenceId]) -> list[int]:
        ready = running.step.ready
        return [index for index in running.left_to_host if ready[index].start.sequence_id not in late]

    def _sample_by_host(self, running: _StepOnDevice, late: Set[SequenceId]) -> list[tuple[int, Sampled]]:
        indices, logits = self._sampled_by_host(running, late), running.launched.logits
        if logits is None:
            return []
        rows = [running.step.ready[index].sampling for index in indices]
        own = logits if len(indices) == len(logits) else logits[indices]
        return list(zip(indices, sample(own, rows, _draw), strict=True))

    def _prompt_logprobs(self, step: StepInput, hidden: Tensor | None) -> dict[SequenceId, tuple[TokenLogprobs, ...]]:
        if hidden is None:
            return {}
        return prompt_logprobs(
            step, self._decoder.spec.vocab_size, lambda first, last: self._decoder.logits(hidden[first:last])
        )

    def _pool(
        self, runs: list[PooledRun], hidden: Tensor | None
    ) -> tuple[dict[SequenceId, tuple[float, ...]], dict[SequenceId, str]]:
        if hidden is None or not runs:
            return {}, {}
        wanted = torch.cat([hidden[run.first : run.last] for run in runs]).float().cpu()
        return pool_hidden_states(runs, lambda first, last: wanted[first:last])

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes a second that the device reads and its operations a second, measured in a moment, now."""
        with self._decoder.on_device():  # events belong to the current device
            return measure_device_peaks(report, self._decoder.device)

    def close(self) -> None:
        """Release the weights and the KV pool."""
        self._constrained.close()
        for stepper in (self._stepper, *self._draft_steppers):
            stepper.close()  # else what it has made refers to it, and it to the model
        self.draft_with(Speculator(None, None, self._vocab_size))  # what drafted goes, too
        del self._decoder, self._stepper, self._draft_steppers


def _wants_logprobs(step: StepInput, index: int) -> bool:
    row = step.rows[index]
    return row.num_prompt_logprobs is not None and row.num_computed_tokens < row.num_prompt_tokens - 1


def _draw(logits: Tensor, row_ids: Sequence[int], options: Sequence[DrawOptions]) -> list[tuple[int, SampleStatus]]:
    """Draw the tokens of some rows on the device; see sampling.sampler.Draw."""
    if not row_ids:
        return []
    rows = logits if len(row_ids) == len(logits) else logits[list(row_ids)]
    has_cuts = any(not row.is_greedy and (row.top_k > 0 or row.top_p < 1 or row.log_min_p > float("-inf")) for row in options)
    found = sample_rows(rows, row_options(options, logits.shape[1], logits.device), has_cuts)
    return list(zip(found.tokens.tolist(), map(SampleStatus, found.statuses.tolist()), strict=True))
