"""DeviceRunner: executes step plans on a GPU, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from traceback import clear_frames

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import ConfigError, DeviceLostError, InvariantError, WorkerError
from quire.base.ids import SequenceId
from quire.contracts.memory import MemoryPlan, ModelReport
from quire.contracts.step import StepPlan, StepResult, TokenLogprobs
from quire.grammar.masks import MaskFiller
from quire.kernels.cpu.sampling import DrawOptions, SampleStatus
from quire.kernels.triton.sampling import row_options, sample_rows
from quire.model.device_decoder import DeviceDecoder
from quire.sampling.sampler import Sampled, error_of_status, sample
from quire.speculate.speculator import Speculator
from quire.worker.constrained import ConstrainedRows
from quire.worker.device.faults import is_lost, is_out_of_memory, release_unused
from quire.worker.device.host_step import host_step
from quire.worker.device.memory import HOW_TO_SAVE
from quire.worker.device.peaks import measure_device_peaks
from quire.worker.device.staging import NUM_READBACKS
from quire.worker.device.stepper import DeviceStepper, Kept, Launched, TableChanges
from quire.worker.input_batch import InputBatch, PooledRun, StepInput
from quire.worker.prompt_results import pool_hidden_states, prompt_logprobs
from quire.worker.sampled_results import expect_tokens, take_expected, take_sampled

_FINE = int(SampleStatus.FINE)


@dataclass(frozen=True, slots=True)
class _StepOnDevice:
    """A step that was launched, and what is to be done with it; implements contracts.step.LaunchedStep.

    places               indices, in their rows, of the tokens that it samples, where the device samples all of them
    left_to_host         sequences, by index, whose tokens the host samples
    has_prompt_logprobs  whether log probabilities of prompt tokens are asked for
    """

    runner: DeviceRunner
    plan: StepPlan
    step: StepInput
    launched: Launched
    constrained: ConstrainedRows
    places: list[int]
    left_to_host: list[int]
    has_prompt_logprobs: bool
    pooled_runs: list[PooledRun]

    @property
    def allows_next(self) -> bool:
        """Whether all that is asked for is tokens, which the device keeps, and has sampled itself."""
        return self.launched.logits is None and self.launched.hidden is None

    def collect(self) -> StepResult:
        """See contracts.step.LaunchedStep."""
        return self.runner.collect(self)


class DeviceRunner:
    """Runs the model over the plans of one scheduler; implements contracts.step.AheadRunner. It drafts nothing.

    A step is launched as a whole before anything is read back. Its next tokens are sampled on the device, and stay there for
    the next step, which may be launched before they are read; where a sequence asks for more than the device's sampler knows
    (log probabilities, penalties, constraints), its logits go through the ordinary sampler, with its token drawn on the device
    all the same, and the next step has to wait for it.
    """

    def __init__(self, decoder: DeviceDecoder, stepper: DeviceStepper, memory: MemoryPlan, max_num_seqs: int) -> None:
        self._decoder, self._stepper = decoder, stepper
        self._block_size = memory.kv.block_size
        max_blocks = -(-memory.max_model_len // self._block_size)
        self._batch = InputBatch(max_num_seqs, max_blocks, self._block_size, decoder.spec.vocab_size)
        self._is_on_device = np.zeros(max_num_seqs, np.bool_)  # whether a line's last token is the device's own
        self._masks = MaskFiller()
        self._num_on_their_way = 0

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
        self._num_on_their_way += 1
        return launched

    def collect(self, running: _StepOnDevice) -> StepResult:
        """Wait for a step, and take in what it found."""
        self._num_on_their_way -= 1
        with self._on_device():
            return self._collect(running)

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
        self._batch.apply(plan)
        changes = self._changes(plan)
        step = self._batch.build(plan)
        if not step.rows:
            launched = self._stepper.launch(None, "plain", changes)
            return _StepOnDevice(self, plan, step, launched, ConstrainedRows((), {}, self._masks), [], [], False, [])
        has_prompt_logprobs = step.wants_prompt and any(_wants_logprobs(step, index) for index in range(len(step.rows)))
        pooled_runs = step.pooled_rows() if step.wants_prompt else []
        host = host_step(step, self._batch.tables, self._block_size, self._is_on_device)
        columns = self._stepper.columns
        left_to_host = columns.left_to_host(host.sampled_rows)
        constrained = ConstrainedRows(step.ready, {}, self._masks)
        try:
            kept = Kept(bool(left_to_host), has_prompt_logprobs or bool(pooled_runs))
            launched = self._stepper.launch(host, columns.sampling_of(host.sampled_rows), changes, kept)
        except BaseException:
            constrained.wait()
            raise
        # From here on the rows stand behind this step, whose tokens are to come.
        self._is_on_device[host.sampled_rows] = True
        self._is_on_device[host.sampled_rows[left_to_host]] = False
        self._batch.advance(step)
        places: list[int] = []
        if not left_to_host:
            expect_tokens(step.ready)
            places = host.sample_positions.tolist()
        return _StepOnDevice(self, plan, step, launched, constrained, places, left_to_host, has_prompt_logprobs, pooled_runs)

    def _changes(self, plan: StepPlan) -> TableChanges:
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
        return TableChanges(entries, plan.block_copies)

    def _collect(self, running: _StepOnDevice) -> StepResult:
        plan, step, launched = running.plan, running.step, running.launched
        running.constrained.wait()
        found = self._prompt_logprobs(step, launched.hidden) if running.has_prompt_logprobs else {}
        pooled, errors = self._pool(running.pooled_runs, launched.hidden)
        token_ids, statuses = self._stepper.take_sampled(launched)
        failures = {index: error_of_status(SampleStatus(status)) for index, status in enumerate(statuses) if status != _FINE}
        if running.left_to_host:
            outcomes = [
                Sampled(None, error=failures[index]) if index in failures else Sampled(token_id)
                for index, token_id in enumerate(token_ids)
            ]
            for index, outcome in self._sample_by_host(running):
                outcomes[index] = outcome
            result = take_sampled(plan.step_id, step.ready, outcomes, found)
        else:
            result = take_expected(plan.step_id, step.ready, running.places, token_ids, failures, found)
        return replace(result, pooled=pooled, errors={**result.errors, **errors}) if running.pooled_runs else result

    def _sample_by_host(self, running: _StepOnDevice) -> list[tuple[int, Sampled]]:
        indices, logits = running.left_to_host, running.launched.logits
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

    def draft_with(self, speculator: Speculator) -> None:
        """Raise ConfigError: this runner drafts nothing."""
        raise ConfigError("drafts are not there on a GPU yet; choose device='cpu'")

    def pause_drafts(self, is_wanted: bool) -> None:
        """Change nothing: there are no drafts."""

    def draft_forced(self, is_wanted: bool) -> None:
        """Raise ConfigError where drafts are wanted: this runner drafts nothing."""
        if is_wanted:
            raise ConfigError("tokens that constraints force are not drafted on a GPU yet; choose device='cpu'")

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """Return the bytes a second that the device reads and its operations a second, measured in a moment, now."""
        with self._decoder.on_device():  # events belong to the current device
            return measure_device_peaks(report, self._decoder.device)

    def close(self) -> None:
        """Release the weights and the KV pool."""
        self._masks.close()
        self._stepper.close()
        del self._decoder, self._stepper


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
