"""GpuStepExecutor: runs the steps of a model, or of a draft head, on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import DeviceLostError, InvariantError, WorkerError
from quire.contracts.memory import ModelReport
from quire.contracts.rank_stats import RankStats
from quire.kernels.cpu.sampling import DrawOptions, SampleStatus
from quire.kernels.triton.attention import tile_queries
from quire.kernels.triton.last_token_buffer import keep_ids_launch, take_inputs_launches
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.sampling import Choices, sample_launches, sample_rows
from quire.kernels.triton.sampling import row_options as draw_options
from quire.kernels.triton.step import AttentionLibrary, DeviceAttentionMetadata, TileLists, list_tiles
from quire.kernels.triton.tiles import LONG_CHUNK
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.heads.device_head import DeviceHead
from quire.sampling.sampler import Draw, error_of_status
from quire.speculate.proposer import DraftInput
from quire.worker.device.block_table_updates import BlockTableUpdates, change_parts
from quire.worker.device.faults import is_lost, is_out_of_memory, release_unused
from quire.worker.device.graphs import GraphGrid, GraphKey, PromptGrid, PromptKey, StepGraphs
from quire.worker.device.host_step import (
    HostStep,
    Sampling,
    empty_step,
    fill,
    fill_lines_of_decode,
    fill_places,
    fill_sampled,
    full_step,
    host_step,
)
from quire.worker.device.memory import HOW_TO_SAVE
from quire.worker.device.mixed_step import (
    MixedSizes,
    StepShape,
    exact_sizes,
    exact_step,
    fill_tiles,
    most_recorded_tokens,
    padded_sizes,
    padded_step,
    short_runs,
    token_parts,
)
from quire.worker.device.peaks import measure_device_peaks
from quire.worker.device.sampling_table import SamplingTable, option_parts, row_options
from quire.worker.device.staged_call import ChangeCounts, StagedCall
from quire.worker.device.staging import NUM_READBACKS, Part, Readback, Staged, Staging, staged_bytes
from quire.worker.step_executor import NO_FAILURES, Moves, SlotSampling, StepTokens, TableEntry


class StepSizes(NamedTuple):
    """The largest step, and the longest sequence.

    max_num_drafts  drafts of a step at most, behind which tokens are sampled
    has_drafts      whether steps with drafts are to be expected, so that small ones are recorded, too
    has_trees       whether some of these are trees
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_drafts: int = 0
    has_drafts: bool = False
    has_trees: bool = False


class Launched(NamedTuple):
    """A step that was launched.

    num_sampled  next tokens that read_sampled will return
    num_rows     the same with padding
    logits       [R, vocab_size] in the model's dtype; of a CUDA graph until the next one runs; None: not kept
    hidden       [T, hidden_size] after the final norm; of a CUDA graph until the next one runs; None: not kept
    readback     where the tokens arrive
    """

    num_sampled: int = 0
    num_rows: int = 0
    logits: Tensor | None = None
    hidden: Tensor | None = None
    readback: int = 0


class Kept(NamedTuple):
    """What is kept of a step, in addition to the next tokens."""

    logits: bool = False
    hidden: bool = False


class _Frame(NamedTuple):
    """The arrays of one kind of step, at fixed addresses, and a function that launches its kernels."""

    staged: Staged
    run: Callable[[], None]


_NOTHING = Kept()


def _waits_by(method: weakref.WeakMethod[Callable[[torch.cuda.Event], None]]) -> Callable[[torch.cuda.Event], None]:
    """Return a function that waits for an event by a method, without keeping its object alive."""

    def wait(event: torch.cuda.Event) -> None:
        bound = method()
        if bound is None:
            event.synchronize()
        else:
            bound(event)

    return wait


class GpuStepExecutor:
    """Implements StepExecutor, and launches the steps of a draft model or a draft head, which have no driver of their own.

    Batch slots [0, max_num_seqs) belong to sequences, and the last one, padding_slot, to padding. All inputs of a step are
    copied to the GPU in one transfer. Every step samples a token for each of its logit_rows on the GPU, and keeps it there for
    the next step of its batch slot.
    """

    has_sampler = True
    max_in_flight = NUM_READBACKS

    def __init__(
        self,
        decoder: DeviceDecoder | DeviceHead,
        pool: DeviceKvPool,
        sizes: StepSizes,
        graphs: StepGraphs,
        library: AttentionLibrary | None = None,
    ) -> None:
        self._decoder, self._pool, self._sizes, self._graphs = decoder, pool, sizes, graphs
        self._library = library  # attends in steps without a CUDA graph; with a library all steps with prompts are such
        device, spec = decoder.device, decoder.spec
        self.has_rope_variants = spec.rope_switch_len(sizes.max_model_len) is not None
        self.has_states = False  # see device_refusal
        self.padding_slot = sizes.max_num_seqs
        self.sampling_table = SamplingTable(sizes.max_num_seqs + 1, spec.vocab_size)
        self.vocab_size, self.block_size = spec.vocab_size, pool.spec.block_size
        self.draw: Draw | None = draw_on_device
        self.grid = GraphGrid(sizes.max_num_seqs)
        is_recording = graphs.is_recording and library is None
        specs = [spec] if decoder.ranks is None else decoder.ranks.specs  # on all ranks steps have the same arrays
        most_recorded = min(most_recorded_tokens(each, sizes.max_num_batched_tokens) for each in specs)
        most_tokens = most_recorded if is_recording else 0
        lengths = sorted({min(LONG_CHUNK, sizes.max_model_len), sizes.max_model_len})
        self.prompts = PromptGrid(most_tokens, lengths, sizes.has_drafts, sizes.has_trees)
        max_blocks = -(-sizes.max_model_len // pool.spec.block_size)
        self._tables = torch.zeros(sizes.max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self._last_ids = torch.zeros(sizes.max_num_seqs + 1, dtype=torch.int64, device=device)
        most = self.grid.max_rows
        self.block_tables = np.zeros((sizes.max_num_seqs, max_blocks), dtype=np.int64)  # on the host, written by the driver
        self._entries: Sequence[TableEntry] = ()  # of block_tables, to be sent before the next step
        self._block_copies: Sequence[tuple[int, int]] = ()
        self._moves: Moves | None = None
        self._logit_rows: list[int] = []  # of the step that was started last
        # What CUDA graphs read and write besides their staged arrays.
        most_lines = max(most, min(sizes.max_num_seqs, most_tokens) + 1)
        self._step_tables = torch.zeros(most_lines, max_blocks, dtype=torch.int32, device=device)
        self._step_ids = torch.zeros(max(most, most_tokens), dtype=torch.int64, device=device)
        self._hidden = torch.empty(most_tokens, spec.hidden_size, dtype=decoder.dtype, device=device)
        self._logits = torch.empty(most, spec.vocab_size, dtype=decoder.dtype, device=device)
        # Tokens i64, then their statuses, two i32 in one, so that one copy brings both.
        most_sampled = sizes.max_num_seqs + sizes.max_num_drafts
        self._result = torch.zeros(_result_size(most_sampled), dtype=torch.int64, device=device)
        wait = _waits_by(weakref.WeakMethod(self._wait_for))  # no cycle: what is closed is freed at once
        self._readback = Readback(self._result, wait)
        kv_dtype, is_in_order = pool.caches[0].k.dtype, decoder.is_in_order
        attention = [layer.attention for each in specs for layer in each.layers]
        kinds = {tile_queries(each, decoder.dtype, kv_dtype, is_in_order) for each in attention}
        self.tile_kinds = sorted(kinds)
        self._staging = Staging(self._most_bytes(max_blocks), device, wait)
        self._frames: dict[GraphKey | PromptKey, _Frame] = {}

    def _most_bytes(self, max_blocks: int) -> int:
        num_seqs, num_tokens, num_drafts = (
            self._sizes.max_num_seqs,
            self._sizes.max_num_batched_tokens,
            self._sizes.max_num_drafts,
        )
        tiles = tuple((num_seqs, num_tokens) for _ in self.tile_kinds)
        sizes = [MixedSizes(num_tokens, num_seqs, tiles, num_drafts > 0)]
        sizes += [padded_sizes(key, num_seqs, self.tile_kinds) for key in self.prompts.keys[:1]]
        changes = change_parts(num_seqs * (max_blocks + 2), num_seqs, num_drafts, num_seqs)
        behind = [*_sampled_parts(num_seqs + num_drafts), *changes]
        return max(staged_bytes([*own.parts, *behind]) for own in sizes)

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """See StepExecutor. Raises WorkerError, which says what to lower, when memory ends, and DeviceLostError when nothing
        runs on the device any more."""
        device = self._decoder.device
        try:
            with torch.inference_mode(), self._decoder.on_device():
                yield
        except Exception as error:
            self._entries, self._block_copies = (), ()  # of a step that was not started: its sequences have failed
            if is_out_of_memory(error):
                clear_frames(error.__traceback__)  # which hold the step's tensors
                release_unused(device)
                raise WorkerError(f"the device has not enough memory for this step: {HOW_TO_SAVE} ({error})") from error
            if is_lost(device):
                raise DeviceLostError(f"nothing runs on {device} any more in this process: {error}") from error
            raise

    def _wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event of the device."""
        event.synchronize()

    def set_sampling(self, batch_slot: int, sampling: SlotSampling) -> None:
        """See StepExecutor."""
        self.sampling_table.set(batch_slot, sampling)

    def begin_step(self, entries: Sequence[TableEntry], block_copies: Sequence[tuple[int, int]]) -> None:
        """See StepExecutor. The changes are sent with the step."""
        self._entries, self._block_copies = entries, block_copies

    def move_tokens(self, moves: Moves) -> None:
        """See StepExecutor. The moves are made with the next step that is started, also if one fails before that."""
        self._moves = moves

    def flush(self) -> None:
        """See StepExecutor."""
        updates = self._take_updates()
        if not updates.is_empty:
            self._staging.wait()
            self._staging.holds = None
            self._call(StagedCall(ChangeCounts.of(updates)), 0, updates)

    def _take_updates(self) -> BlockTableUpdates:
        updates = BlockTableUpdates(self._entries, self._block_copies, self._moves)
        self._entries, self._block_copies, self._moves = (), (), None
        return updates

    def start_step(
        self,
        tokens: StepTokens,
        samples: bool,
        keeps_logits: bool,
        hidden_rows: Sequence[int],
        keeps_prompt_logits: bool,
        reads: Sequence[DraftInput],
    ) -> Launched:
        """See StepExecutor. It samples in any case, and keeps features as keep_features of the decoder says."""
        step = host_step(tokens, self.block_tables, self.block_size, self._decoder.num_long_rope_rows)
        kept = Kept(keeps_logits, keeps_prompt_logits or bool(hidden_rows))
        self._logit_rows = tokens.logit_rows
        return self.launch(step, self.sampling_table.sampling_of(step.sampled_rows), self._take_updates(), kept)

    def take_sampled(self, started: Launched) -> tuple[list[int], Mapping[int, str]]:
        """See StepExecutor."""
        token_ids, statuses = self.read_sampled(started)
        if not any(statuses):
            return token_ids, NO_FAILURES
        failed = [(index, SampleStatus(status)) for index, status in enumerate(statuses) if status != SampleStatus.FINE]
        return token_ids, {index: error_of_status(status) or "no token could be sampled" for index, status in failed}

    def logits(self, started: Launched) -> Tensor:
        """See StepExecutor."""
        if started.logits is None:
            raise InvariantError("the step did not keep its logits")
        return started.logits

    def logits_at(self, started: Launched, first: int, last: int) -> Tensor:
        """See StepExecutor."""
        return self._decoder.logits(_hidden_of(started)[first:last])

    def hidden_states(self, started: Launched, hidden_rows: Sequence[int]) -> Callable[[int, int], Tensor]:
        """See StepExecutor. All rows are copied to the host at once."""
        hidden = _hidden_of(started)
        wanted = hidden[torch.tensor(list(hidden_rows), device=hidden.device)].float().cpu()
        return lambda first, last: wanted[first:last]

    def features(self, what: DraftInput, rows: Sequence[int]) -> Tensor:
        """See StepExecutor."""
        if isinstance(self._decoder, DeviceHead):
            raise InvariantError("a draft head keeps no features")
        return self._decoder.features_at([self._logit_rows[place] for place in rows] if what == "last" else rows)

    def keep_inputs(self, layers: tuple[int, ...]) -> None:
        """See StepExecutor: what is kept is part of the CUDA graphs, and never changes; see DeviceDecoder.keep_features."""

    def measure_peaks(self, report: ModelReport) -> tuple[float, float]:
        """See StepExecutor."""
        with self._decoder.on_device():  # events belong to the current device
            return measure_device_peaks(report, self._decoder.device)

    def give_pool(self, pool: DeviceKvPool) -> None:
        """Use another pool, which differs only in its number of blocks; all CUDA graphs are dropped."""
        self.close()
        self._pool = pool

    def rank_stats(self) -> list[RankStats]:
        """See StepExecutor."""
        return []

    def check_health(self) -> None:
        """See StepExecutor: it is the only process."""

    def close(self) -> None:
        """Drop all CUDA graphs, so that their memory can be freed."""
        self._graphs.clear()
        self._frames.clear()

    def launch(self, step: HostStep | None, sampling: Sampling, changes: BlockTableUpdates, kept: Kept = _NOTHING) -> Launched:
        """Launch the changes, and then a step if there is one; return before the device is done."""
        self._staging.wait()
        if step is None:
            self._staging.holds = None
            self._call(StagedCall(ChangeCounts.of(changes)), 0, changes)
            return self._read_back(Launched())
        if step.is_decode and not kept.hidden and len(step.counts) <= self.grid.max_rows:
            return self._launch_decode(step, sampling, changes, kept)
        return self._launch_mixed(step, sampling, changes, kept, self.prompts.max_tokens)

    def read_sampled(self, launched: Launched) -> tuple[list[int], list[int]]:
        """Wait for a step; return its next tokens, -1 where there is none, and their statuses.

        To be called before NUM_READBACKS more steps are launched. Another one may have been launched already.
        """
        count, first_status = launched.num_sampled, _first_status(launched.num_rows)
        found = self._readback.wait(launched.readback, _result_size(launched.num_rows))
        return found[:count].tolist(), found[first_status:].view(np.int32)[:count].tolist()

    def run_full(self, num_tokens: int, num_sequences: int, context_len: int) -> None:
        """Run a step of padding of that size, one by one, with all of its launches; see host_step.full_step."""
        num_short = max(most for _, most in self.tile_kinds)
        step = full_step(num_tokens, num_sequences, context_len, self.padding_slot, num_short, self._sizes.max_num_drafts)
        self._staging.wait()
        self._launch_mixed(step, "cuts", BlockTableUpdates([]), _NOTHING, 0)

    @property
    def keys(self) -> list[GraphKey | PromptKey]:
        """The kinds of steps that are recorded, what takes most memory first, of those with prompts and of the others."""
        return [*self.prompts.keys, *self.grid.keys]

    def record_largest(self) -> None:
        """Record steps of padding that take as much memory as any, and run them; what others need of it is there then."""
        for keys in (self.prompts.keys, self.grid.keys):
            self._record_and_run(keys[:1])

    def record_samples(self) -> None:
        """Do the same with steps of every sort: what takes most memory, least, and as much as half of the kinds."""
        self.record_largest()
        for keys in (self.prompts.keys, self.grid.keys):
            self._record_and_run([*keys[len(keys) // 2 :][:1], *keys[-1:]])

    def record_copies(self, count: int) -> None:
        """Record the step with most launches so many times more, and run each."""
        key = self.keys[0]
        self.record(key)  # what they read is on the device then
        self._graphs.record_more(key, self._frames[key].run, count)

    def _record_and_run(self, keys: Sequence[GraphKey | PromptKey]) -> None:
        for key in keys:
            self.record(key)
            self.record(key)  # its first launch takes memory, too

    def record(self, key: GraphKey | PromptKey) -> None:
        """Run a step of padding: recorded if it was before, else it is recorded."""
        if isinstance(key, PromptKey):
            self._record_prompts(key)
        else:
            # Its launches are those for any lengths: the shortest take no time, however long sequences may become.
            step = full_step(key.num_rows, key.num_rows, 1, self.padding_slot)
            self._staging.wait()
            self._launch_decode(step, key.sampling, BlockTableUpdates([]), _NOTHING)

    def _launch_decode(self, step: HostStep, sampling: Sampling, changes: BlockTableUpdates, kept: Kept) -> Launched:
        count = len(step.counts)
        key = self.grid.key(count, sampling)
        frame = self._decode_frame(key)
        host = frame.staged.host
        slots = (key, self.sampling_table.num_changes, step.rows.tobytes())
        if self._staging.holds != slots:
            fill_lines_of_decode(host, step, self.padding_slot)
            self.sampling_table.fill(host)
            self._staging.holds = slots
        fill_places(host, step)
        call = StagedCall(ChangeCounts.of(changes), key, None, sampling, key.num_rows)
        self._call(call, frame.staged.end, changes)
        return self._read_back(Launched(count, key.num_rows, self._logits[:count] if kept.logits else None))

    def _read_back(self, launched: Launched) -> Launched:
        return launched._replace(readback=self._readback.start(_result_size(launched.num_rows)))

    def _decode_frame(self, key: GraphKey) -> _Frame:
        """Return the arrays of a recorded step of as many sequences as tokens, and its launches."""
        frame = self._frames.get(key)
        if frame is not None:
            return frame
        num_rows = key.num_rows
        staged = self._staging.arrange([*token_parts(num_rows, num_rows), *_sampled_parts(num_rows)])
        arrays = staged.device
        ids, tables = self._step_ids[:num_rows], self._step_tables[:num_rows]
        places = arrays["slots"], arrays["query_starts"], arrays["context_lens"]

        def run() -> None:
            step = DeviceAttentionMetadata.of_decode(*places, tables, self._sizes.max_model_len)
            self._take_inputs(ids, tables, arrays)
            hidden = self._decoder.forward(ids, arrays["positions"], step, self._pool)
            logits = self._decoder.logits(hidden, out=self._logits[:num_rows])
            self._sample(logits, arrays, key.sampling)

        frame = self._frames[key] = _Frame(staged, run)
        return frame

    def _launch_mixed(
        self, step: HostStep, sampling: Sampling, changes: BlockTableUpdates, kept: Kept, most_recorded_tokens: int
    ) -> Launched:
        num_tokens, num_sampled = len(step.given_ids), len(step.logit_rows)
        lists = [list_tiles(step.counts, *kind, step.context_lens.tolist()) for kind in self.tile_kinds]
        key = None
        if num_tokens <= most_recorded_tokens:
            key = self.prompts.key(num_tokens, int(step.context_lens.max()), short_runs(lists), step.trees is not None)
        shape = StepShape.of(step) if key is None else None
        call = StagedCall(ChangeCounts.of(changes), key, shape, sampling, num_sampled, kept.hidden)
        staged, sampled = self._arrange_mixed(call, lists)
        self._staging.holds = None
        fill(staged.host, step, self.padding_slot)
        fill_tiles(staged.host, step, lists, self.tile_kinds)
        fill_sampled(sampled.host, step)
        self.sampling_table.fill(sampled.host)
        logits, hidden = self._call(call, sampled.end, changes, lists)
        kept_hidden = hidden[:num_tokens] if kept.hidden and hidden is not None else None
        if num_sampled == 0:
            return self._read_back(Launched(hidden=kept_hidden))
        return self._read_back(Launched(num_sampled, num_sampled, logits if kept.logits else None, kept_hidden))

    def _call(
        self, call: StagedCall, start: int, changes: BlockTableUpdates, lists: Sequence[TileLists] = ()
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write the changes behind the arrays of a step, which end at `start`, and launch; returns what run_staged does."""
        end = start
        if not changes.is_empty:
            staged = self._staging.arrange(changes.parts(), start)
            changes.fill(staged, self._tables.shape[1])
            end = staged.end
        self._publish(call, self._staging.host_bytes[:end])
        return self.run_staged(call, lists)

    def _publish(self, call: StagedCall, staged: NDArray[np.uint8]) -> None:
        """Tell other ranks what is launched now, with the bytes of the staging buffer; here there are none."""

    def run_staged(self, call: StagedCall, lists: Sequence[TileLists] = ()) -> tuple[Tensor | None, Tensor | None]:
        """Send what is in the staging buffer, and launch a call; return the logits and the hidden states of its step.

        lists  the tiles of a step without a recording; none: they are found
        Logits are None where it samples nothing. Hidden states are None of a recorded decode step, and may have padding.
        """
        if isinstance(call.key, GraphKey):
            frame = self._decode_frame(call.key)
            self._send(frame.staged.end, call.changes)
            self._graphs.run(call.key, frame.run)
            return self._logits[: call.key.num_rows], None
        if call.key is None and call.shape is None:
            self._send(0, call.changes)
            return None, None
        if call.shape is not None and not lists:
            lists = [list_tiles(call.shape.counts, *kind, call.shape.context_lens) for kind in self.tile_kinds]
        staged, sampled = self._arrange_mixed(call, lists)
        self._send(sampled.end, call.changes)
        if call.key is not None:
            self._graphs.run(call.key, self._prompt_frame(call.key).run)
            hidden = self._hidden
        else:
            hidden = self._run_exact(call, lists, staged.device)
        if call.num_sampled == 0:
            return None, hidden
        logits = self._decoder.logits(hidden.index_select(0, sampled.device["logit_rows"]))
        self._sample(logits, sampled.device, call.sampling)
        return logits, hidden

    def fill_staging(self, staged: NDArray[np.uint8]) -> None:
        """Take over what another rank has in its staging buffer, before run_staged."""
        self._staging.wait()
        self._staging.holds = None
        self._staging.host_bytes[: len(staged)] = staged

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits of rows of hidden states."""
        return self._decoder.logits(hidden)

    def _arrange_mixed(self, call: StagedCall, lists: Sequence[TileLists]) -> tuple[Staged, Staged]:
        """Return the arrays of a step with prompts, and of the tokens of it that get a next one."""
        if isinstance(call.key, PromptKey):
            staged = self._prompt_frame(call.key).staged
        elif call.shape is not None:
            staged = self._staging.arrange(exact_sizes(call.shape, lists).parts)
        else:
            raise InvariantError("a step with prompts is recorded, or has a shape")
        return staged, self._staging.arrange(_sampled_parts(call.num_sampled), staged.end)

    def _run_exact(self, call: StagedCall, lists: Sequence[TileLists], arrays: Mapping[str, Tensor]) -> Tensor:
        """Launch a step one by one, and return its hidden states."""
        device, shape = self._decoder.device, call.shape
        if shape is None:
            raise InvariantError("a step that is launched one by one has a shape")
        ids = torch.empty(sum(shape.counts), dtype=torch.int64, device=device)
        tables = torch.empty(len(shape.counts), self._tables.shape[1], dtype=torch.int32, device=device)
        self._take_inputs(ids, tables, arrays)
        device_step = exact_step(shape, arrays, tables, lists, self.tile_kinds, self._library)
        return self._decoder.forward(ids, arrays["positions"], device_step, self._pool)

    def _record_prompts(self, key: PromptKey) -> None:
        self._staging.wait()
        self._staging.holds = None
        frame = self._prompt_frame(key)
        nothing, lists = empty_step(), [list_tiles((), *kind, ()) for kind in self.tile_kinds]
        fill(frame.staged.host, nothing, self.padding_slot)
        fill_tiles(frame.staged.host, nothing, lists, self.tile_kinds)
        self._staging.send(frame.staged.end)
        self._graphs.run(key, frame.run)

    def _prompt_frame(self, key: PromptKey) -> _Frame:
        """Return the arrays of a recorded step with prompts; which tokens get a next one, and which, stands behind them."""
        frame = self._frames.get(key)
        if frame is not None:
            return frame
        sizes = padded_sizes(key, self._sizes.max_num_seqs, self.tile_kinds)
        staged = self._staging.arrange(sizes.parts)
        arrays = staged.device
        ids, tables = self._step_ids[: sizes.num_tokens], self._step_tables[: sizes.num_sequences]

        def run() -> None:
            step = padded_step(key, arrays, tables, self.tile_kinds)
            self._take_inputs(ids, tables, arrays)
            hidden = self._decoder.forward(ids, arrays["positions"], step, self._pool)
            self._hidden[: len(hidden)].copy_(hidden)

        frame = self._frames[key] = _Frame(staged, run)
        return frame

    def _take_inputs(self, ids: Tensor, tables: Tensor, arrays: Mapping[str, Tensor]) -> None:
        rows = arrays["token_rows"], arrays["rows"]
        run_all(take_inputs_launches(ids, tables, arrays["given_ids"], *rows, self._last_ids, self._tables))

    def _sample(self, logits: Tensor, arrays: Mapping[str, Tensor], sampling: Sampling) -> None:
        count = len(logits)
        statuses = self._result[_first_status(count) : _result_size(count)].view(torch.int32)[:count]
        choices = Choices(self._result[:count], statuses)
        run_all(sample_launches(choices, logits, row_options(arrays), sampling == "cuts"))
        keep_ids_launch(self._last_ids, choices.tokens, arrays["sampled_rows"]).run()

    def _send(self, start: int, changes: ChangeCounts) -> None:
        """Copy the arrays that end at `start` to the device, with those of the changes behind them, and make the changes."""
        if changes.is_empty:
            if start:
                self._staging.send(start)
            return
        staged = self._staging.arrange(change_parts(*changes), start)
        if staged.end:
            self._staging.send(staged.end)
        arrays = staged.device
        if changes.num_moved:
            self._pool.move_tokens(arrays["move_sources"], arrays["move_targets"], arrays["move_starts"])
        if changes.num_copies:
            self._pool.copy_blocks(arrays["sources"], arrays["targets"])
        if changes.num_entries:
            self._tables.view(-1).index_copy_(0, arrays["places"], arrays["blocks"])


def _sampled_parts(num_sampled: int) -> list[Part]:
    return [Part("logit_rows", torch.int64, num_sampled), *option_parts(num_sampled)]


def _first_status(num_rows: int) -> int:
    """Return where the statuses of a result begin, at a multiple of 16 bytes."""
    return num_rows + num_rows % 2


def _result_size(num_rows: int) -> int:
    return _first_status(num_rows) + -(-num_rows // 2)


def _hidden_of(started: Launched) -> Tensor:
    if started.hidden is None:
        raise InvariantError("the step did not keep its hidden states")
    return started.hidden


def draw_on_device(logits: Tensor, row_ids: Sequence[int], options: Sequence[DrawOptions]) -> list[tuple[int, SampleStatus]]:
    """Draw the tokens of some rows of logits where these are; see sampling.sampler.Draw."""
    if not row_ids:
        return []
    rows = logits if len(row_ids) == len(logits) else logits[list(row_ids)]
    has_cuts = any(not row.is_greedy and (row.top_k > 0 or row.top_p < 1 or row.log_min_p > float("-inf")) for row in options)
    found = sample_rows(rows, draw_options(options, logits.shape[1], logits.device), has_cuts)
    return list(zip(found.tokens.tolist(), map(SampleStatus, found.statuses.tolist()), strict=True))
