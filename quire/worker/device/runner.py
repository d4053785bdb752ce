"""DeviceRunner: executes step plans on a GPU, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import ConfigError, WorkerError
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
from quire.worker.device.host_step import host_step
from quire.worker.device.memory import HOW_TO_SAVE
from quire.worker.device.peaks import measure_device_peaks
from quire.worker.device.stepper import DeviceStepper, Launched, TableChanges
from quire.worker.input_batch import InputBatch, PooledRun, StepInput
from quire.worker.prompt_results import pool_hidden_states, prompt_logprobs
from quire.worker.sampled_results import PromptLogprobs, take_best, take_sampled

_FINE = int(SampleStatus.FINE)


@dataclass(frozen=True, slots=True)
class _StepOnDevice:
    """A step that was launched, and what is to be done with it."""

    plan: StepPlan
    step: StepInput
    launched: Launched
    constrained: ConstrainedRows
    prompt_logprobs: PromptLogprobs
    pooled_runs: list[PooledRun]


class DeviceRunner:
    """Runs the model over the plans of one scheduler; implements contracts.step.Runner. It drafts nothing.

    A step is launched as a whole before anything is read back. Its next tokens are sampled on the device, and stay there for
    the next step; where a sequence asks for more than the device's sampler knows (log probabilities, penalties, constraints),
    the logits of that step's sequences go through the ordinary sampler, with its tokens drawn on the device all the same.
    """

    def __init__(self, decoder: DeviceDecoder, stepper: DeviceStepper, memory: MemoryPlan, max_num_seqs: int) -> None:
        self._decoder, self._stepper = decoder, stepper
        self._block_size = memory.kv.block_size
        max_blocks = -(-memory.max_model_len // self._block_size)
        self._batch = InputBatch(max_num_seqs, max_blocks, self._block_size, decoder.spec.vocab_size)
        self._is_on_device = np.zeros(max_num_seqs, np.bool_)  # whether a line's last token is the device's own
        self._masks = MaskFiller()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see contracts.step.Runner. Raises WorkerError, which says what to lower, when memory ends."""
        try:
            with torch.inference_mode(), self._decoder.on_device():
                launched = self._launch(plan)
                return StepResult(plan.step_id, {}, {}, {}, {}) if launched is None else self._collect(launched)
        except torch.OutOfMemoryError as error:
            raise WorkerError(f"the device has not enough memory for this step: {HOW_TO_SAVE} ({error})") from error

    def _launch(self, plan: StepPlan) -> _StepOnDevice | None:
        self._batch.apply(plan)
        changes = self._changes(plan)
        if not plan.num_scheduled_tokens:
            self._stepper.launch(None, "none", changes)
            return None
        step = self._batch.build(plan)
        has_prompt_logprobs = step.wants_prompt and any(_wants_logprobs(step, index) for index in range(len(step.rows)))
        pooled_runs = step.pooled_rows() if step.wants_prompt else []
        host = host_step(step, self._batch.tables, self._block_size, self._is_on_device)
        sampling = self._stepper.columns.sampling_of(host.sampled_rows)
        constrained = ConstrainedRows(step.ready, {}, self._masks)
        try:
            keeps_hidden = has_prompt_logprobs or bool(pooled_runs)
            launched = self._stepper.launch(host, sampling, changes, keeps_hidden)
        except BaseException:
            constrained.wait()
            raise
        self._is_on_device[host.sampled_rows] = sampling != "none"
        found = self._prompt_logprobs(step, launched.hidden) if has_prompt_logprobs else {}
        return _StepOnDevice(plan, step, launched, constrained, found, pooled_runs)

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
        """Wait for a step, and take in what it found."""
        plan, step, launched = running.plan, running.step, running.launched
        running.constrained.wait()
        pooled, errors = self._pool(running.pooled_runs, launched.hidden)
        self._batch.advance(step)
        result = self._sample(plan, step, launched, running.prompt_logprobs)
        return replace(result, pooled=pooled, errors={**result.errors, **errors}) if running.pooled_runs else result

    def _sample(self, plan: StepPlan, step: StepInput, launched: Launched, found: PromptLogprobs) -> StepResult:
        rows = step.ready
        if launched.num_sampled:
            token_ids, statuses = self._stepper.take_sampled(launched)
            if all(status == _FINE for status in statuses):
                return take_best(plan.step_id, rows, token_ids, found)
            outcomes = [
                Sampled(token_id) if status == _FINE else Sampled(None, error=error_of_status(SampleStatus(status)))
                for token_id, status in zip(token_ids, statuses, strict=True)
            ]
        else:
            outcomes = [] if launched.logits is None else sample(launched.logits, [row.sampling for row in rows], _draw)
        return take_sampled(plan.step_id, rows, outcomes, found)

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
