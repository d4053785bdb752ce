"""DeviceSampler: finds the next tokens of a step on the device, keeps them there, and brings them to the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.step import TokenLogprobs
from quire.kernels.cpu.sampling import SampleStatus
from quire.kernels.triton.last_token_buffer import scatter_ids_launch
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.logprobs import LOGPROB_WIDTH, MAX_TOP, logprob_launches
from quire.kernels.triton.processors import ProcessorOptions, ProcessorTables, count_launch, process_launch
from quire.kernels.triton.sampling import Choices, sample_launches
from quire.sampling.row_state import SamplingRow
from quire.sampling.sampler import error_of_status
from quire.worker.device.host_step import SAMPLINGS, Sampling
from quire.worker.device.launched_step import StepSizes, masked_parts
from quire.worker.device.row_processors import ProcessorUpdates, SlotProcessors, update_tables
from quire.worker.device.sampling_table import SamplingTable, row_options
from quire.worker.device.staging import NUM_READBACKS, Readback, Staging
from quire.worker.step_executor import NO_FAILURES, SlotSampling


class SampledRows(NamedTuple):
    """What a step has found, on the host: a view that lasts until as many more steps are launched as may be in flight.

    tokens    [R], -1 where there is none
    statuses  [R] values of SampleStatus
    logprobs  [R, LOGPROB_WIDTH] i32, see kernels/triton/logprobs.py; None: they were not asked for
    """

    tokens: list[int]
    statuses: list[int]
    logprobs: NDArray[np.int32] | None = None

    def failures(self, is_processed: NDArray[np.bool_] | None, is_masked: Collection[int]) -> Mapping[int, str]:
        """Return by index why rows have no token; see Launched."""
        if not any(self.statuses):
            return NO_FAILURES
        failed: dict[int, str] = {}
        for index, status in enumerate(map(SampleStatus, self.statuses)):
            if status is not SampleStatus.FINE:
                is_edited = is_processed is not None and bool(is_processed[index])
                failed[index] = error_of_status(status, is_edited, index in is_masked) or "no token could be sampled"
        return failed

    def logprobs_of(self, index: int, num_top: int) -> TokenLogprobs:
        """Return the log probabilities of a row that has asked for them."""
        if self.logprobs is None:
            raise InvariantError("the step found no log probabilities")
        numbers, values = self.logprobs[index], self.logprobs[index].view(np.float32)
        first, last = 2 + MAX_TOP, 2 + MAX_TOP + num_top
        top = tuple(zip(numbers[2 : 2 + num_top].tolist(), values[first:last].tolist(), strict=True))
        return TokenLogprobs(self.tokens[index], float(values[0]), int(numbers[1]), top)


class DeviceSampler:
    """The tables of the batch slots, the last one for padding, and the launches that read and change them.

    samples   no: on a pipeline stage that has no logits, which only has the places of what the last one samples

    last_ids  [num_slots + 1] i64, the token that was sampled last for each batch slot
    """

    def __init__(
        self,
        sizes: StepSizes,
        vocab_size: int,
        device: torch.device,
        wait: Callable[[torch.cuda.Event], None],
        samples: bool = True,
    ) -> None:
        num_slots = sizes.num_slots + 1
        self.samplings: tuple[Sampling, ...] = SAMPLINGS if sizes.has_processors else SAMPLINGS[1:3]
        self.table = SamplingTable(num_slots, vocab_size)
        self.last_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._tables = ProcessorTables.zeros(num_slots, vocab_size, device) if sizes.has_processors and samples else None
        self._new: dict[int, SlotProcessors] = {}  # to be sent before the next step
        # Tokens i64, then their statuses, two i32 in one, then log probabilities, so that one copy brings all.
        most = sizes.max_num_seqs + sizes.max_num_drafts
        self.result = torch.zeros(result_size(most, self.samplings[0]), dtype=torch.int64, device=device)
        self._readback = Readback(self.result, wait, max(NUM_READBACKS, sizes.num_stages))

    @property
    def lasting_tensors(self) -> list[Tensor]:
        """What steps write here, at fixed addresses."""
        return [self.last_ids, self.result, *(() if self._tables is None else self._tables)]

    def set(self, batch_slot: int, sampling: SlotSampling) -> None:
        """Set how a batch slot is sampled from the next step on, without processors."""
        self.table.set(batch_slot, sampling)
        self._new.pop(batch_slot, None)

    def set_processors(self, batch_slot: int, row: SamplingRow) -> None:
        """Set the processors and log probabilities of a batch slot, after `set`; row has all tokens that are known."""
        processors = SlotProcessors.of(row)
        self.table.set_processors(batch_slot, processors.columns)
        if row.edits_logits:
            self._new[batch_slot] = processors

    def take_updates(self) -> list[ProcessorUpdates]:
        """Return what is to be sent before the next step."""
        updates = ProcessorUpdates.split(self._new, self._vocab_size)
        self._new = {}
        return updates

    def update(self, arrays: Mapping[str, Tensor]) -> None:
        """Make changes of `take_updates`, which are on the device."""
        if self._tables is not None:
            update_tables(self._tables, arrays)

    def sample(
        self, logits: Tensor, arrays: Mapping[str, Tensor], sampling: Sampling, token_masks: Tensor | None = None
    ) -> None:
        """Launch what samples a token of each row of logits [R, V], and keeps it.

        arrays       those of sampled_parts
        token_masks  see RowOptions; None: there are none
        """
        count, tables = len(logits), self._tables
        rows = row_options(arrays)._replace(token_masks=token_masks)
        statuses = self.result[status_offset(count) : logprob_offset(count)].view(torch.int32)[:count]
        choices = Choices(self.result[:count], statuses)
        if sampling != "full" or tables is None:
            run_all(sample_launches(choices, logits, rows, sampling != "plain"))
        else:
            options = ProcessorOptions(
                arrays["sampled_rows"], *(arrays[name] for name in ProcessorOptions._fields[1:-1]), arrays["sample_positions"]
            )
            processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            process_launch(processed, logits, tables, options).run()
            run_all(sample_launches(choices, processed, rows, True))
            count_launch(tables, choices.tokens, options).run()
            first, last = logprob_offset(count), result_size(count, sampling)
            found = self.result[first:last].view(torch.int32).view(count, LOGPROB_WIDTH)
            run_all(logprob_launches(found, logits, choices.tokens, arrays["num_tops"]))
        scatter_ids_launch(self.last_ids, choices.tokens, arrays["sampled_rows"]).run()

    def sample_masked(
        self,
        staging: Staging,
        logits: Tensor,
        rows: tuple[NDArray[np.int32], NDArray[np.int64]],
        masks: Mapping[int, Tensor],
    ) -> None:
        """Send the options and masks of rows of logits in one transfer, and sample all of them.

        rows   batch slots and positions, see Launched.deferred
        masks  see RowProcessor.sample_deferred
        """
        count, num_words = len(logits), -(-self._vocab_size // 32)
        staged = staging.arrange(masked_parts(count, self._vocab_size))
        host = staged.host
        host["sampled_rows"][:], host["sample_positions"][:] = rows
        self.table.fill(host)
        host["token_masks"].fill(-1)
        words = host["token_masks"].reshape(count, num_words)
        for index, mask in masks.items():
            words[index] = mask[:num_words].numpy()
        staging.send(staged.end)
        self.sample(logits, staged.device, "full", staged.device["token_masks"].view(count, num_words))

    def start_readback(self, num_rows: int, sampling: Sampling) -> int:
        """Begin to copy the results of a step of so many rows to the host; return where they arrive."""
        return self._readback.start(result_size(num_rows, sampling))

    def read(self, place: int, num_sampled: int, num_rows: int, sampling: Sampling) -> SampledRows:
        """Wait for the results of a step."""
        found = self._readback.wait(place, result_size(num_rows, sampling))
        first = logprob_offset(num_rows)
        statuses = found[status_offset(num_rows) : first].view(np.int32)[:num_sampled]
        logprobs = found[first:].view(np.int32).reshape(num_rows, LOGPROB_WIDTH) if sampling == "full" else None
        return SampledRows(found[:num_sampled].tolist(), statuses.tolist(), logprobs)


def status_offset(num_rows: int) -> int:
    """Return where the statuses of a result begin, at a multiple of 16 bytes."""
    return num_rows + num_rows % 2


def logprob_offset(num_rows: int) -> int:
    """Return where the log probabilities of a result begin, at a multiple of 16 bytes."""
    end = status_offset(num_rows) + -(-num_rows // 2)
    return end + end % 2


def result_size(num_rows: int, sampling: Sampling) -> int:
    """Return how many i64 the sampled tokens of a step take, with their statuses, and log probabilities if it finds these."""
    return logprob_offset(num_rows) + (num_rows * LOGPROB_WIDTH // 2 if sampling == "full" else 0)
