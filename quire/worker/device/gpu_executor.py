"""GpuStepExecutor: what lies on the device beside the model, and how a step is launched over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.attention import tile_queries
from quire.kernels.triton.feedback import keep_ids_launch, take_inputs_launches
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.sampling import Choices, sample_launches
from quire.kernels.triton.step import AttentionLibrary, DeviceStep, TileLists, list_tiles
from quire.kernels.triton.tiles import LONG_CHUNK
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.heads.device_head import DeviceHead
from quire.worker.device.block_table_updates import BlockTableUpdates, change_parts
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
)
from quire.worker.device.mixed_step import (
    MixedSizes,
    exact_sizes,
    exact_step,
    fill_tiles,
    most_recorded_tokens,
    padded_sizes,
    padded_step,
    short_runs,
    token_parts,
)
from quire.worker.device.sampling_table import SamplingTable, option_parts, row_options
from quire.worker.device.staging import Part, Readback, Staged, Staging, staged_bytes


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
    """A step on its way.

    num_sampled  next tokens that take_sampled will return
    num_rows     the same with the padding's
    logits       [R, vocab_size] in the model's dtype; of a recorded step until the next one; None where nobody asked for them
    hidden       [T, hidden_size] after the final norm; of a recorded step until the next one; None where nobody asked for it
    readback     where the tokens arrive
    """

    num_sampled: int = 0
    num_rows: int = 0
    logits: Tensor | None = None
    hidden: Tensor | None = None
    readback: int = 0


class Kept(NamedTuple):
    """What of a step is kept for whoever launches it, beside the next tokens."""

    logits: bool = False
    hidden: bool = False


class _Frame(NamedTuple):
    """The arrays of a step of one kind, at fixed addresses, and what it launches."""

    staged: Staged
    run: Callable[[], None]


_NOTHING = Kept()


class GpuStepExecutor:
    """Launches the steps of one model, or of a head. Lines [0, max_num_seqs) of its tables belong to sequences, the last one
    to padding."""

    def __init__(
        self,
        decoder: DeviceDecoder | DeviceHead,
        pool: DeviceKvPool,
        sizes: StepSizes,
        graphs: StepGraphs,
        library: AttentionLibrary | None = None,
    ) -> None:
        self._decoder, self._pool, self._sizes, self._graphs = decoder, pool, sizes, graphs
        self._library = library  # attends the steps that are launched one by one; with one those with prompts all are
        device, spec = decoder.device, decoder.spec
        self.padding_line = sizes.max_num_seqs
        self.columns = SamplingTable(sizes.max_num_seqs + 1, spec.vocab_size)
        self.grid = GraphGrid(sizes.max_num_seqs)
        is_recording = graphs.is_recording and library is None
        most_tokens = most_recorded_tokens(spec, sizes.max_num_batched_tokens) if is_recording else 0
        lengths = sorted({min(LONG_CHUNK, sizes.max_model_len), sizes.max_model_len})
        self.prompts = PromptGrid(most_tokens, lengths, sizes.has_drafts, sizes.has_trees)
        max_blocks = -(-sizes.max_model_len // pool.spec.block_size)
        self._tables = torch.zeros(sizes.max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self._last_ids = torch.zeros(sizes.max_num_seqs + 1, dtype=torch.int64, device=device)
        most = self.grid.max_rows
        # What recorded steps read and write beside their arrays.
        most_lines = max(most, min(sizes.max_num_seqs, most_tokens) + 1)
        self._step_tables = torch.zeros(most_lines, max_blocks, dtype=torch.int32, device=device)
        self._step_ids = torch.zeros(max(most, most_tokens), dtype=torch.int64, device=device)
        self._hidden = torch.empty(most_tokens, spec.hidden_size, dtype=decoder.dtype, device=device)
        self._logits = torch.empty(most, spec.vocab_size, dtype=decoder.dtype, device=device)
        # Tokens i64, and behind them their statuses, two i32 in one, so that one copy brings both.
        most_sampled = sizes.max_num_seqs + sizes.max_num_drafts
        self._result = torch.zeros(_result_size(most_sampled), dtype=torch.int64, device=device)
        self._readback = Readback(self._result)
        kv_dtype, is_in_order = pool.caches[0].k.dtype, decoder.is_in_order
        kinds = {tile_queries(layer.attention, decoder.dtype, kv_dtype, is_in_order) for layer in spec.layers}
        self.tile_kinds = sorted(kinds)
        self._staging = Staging(self._most_bytes(max_blocks), device)
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

    def give_pool(self, pool: DeviceKvPool) -> None:
        """Take another pool, of the same shape but for its number of blocks; what was recorded is forgotten."""
        self.close()
        self._pool = pool

    def close(self) -> None:
        """Forget what was recorded, so that its memory can go."""
        self._graphs.clear()
        self._frames.clear()

    def launch(self, step: HostStep | None, sampling: Sampling, changes: BlockTableUpdates, kept: Kept = _NOTHING) -> Launched:
        """Launch the changes and a step, which may be missing; returns before the device is done."""
        self._staging.wait()
        if step is None:
            self._staging.holds = None
            self._send(0, changes)
            return self._read_back(Launched())
        if step.is_decode and not kept.hidden and len(step.counts) <= self.grid.max_rows:
            return self._launch_decode(step, sampling, changes, kept)
        return self._launch_mixed(step, sampling, changes, kept, self.prompts.max_tokens)

    def take_sampled(self, launched: Launched) -> tuple[list[int], list[int]]:
        """Wait for a step, and return its next tokens, -1 where there is none, and their statuses.

        To be called before NUM_READBACKS more steps are launched. Another one may have been launched already.
        """
        count, first_status = launched.num_sampled, _first_status(launched.num_rows)
        found = self._readback.wait(launched.readback, _result_size(launched.num_rows))
        return found[:count].tolist(), found[first_status:].view(np.int32)[:count].tolist()

    def run_full(self, num_tokens: int, num_sequences: int, context_len: int) -> None:
        """Run a step of padding of that size, one by one, with all of its launches; see host_step.full_step."""
        num_short = max(most for _, most in self.tile_kinds)
        step = full_step(num_tokens, num_sequences, context_len, self.padding_line, num_short, self._sizes.max_num_drafts)
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
            step = full_step(key.num_rows, key.num_rows, 1, self.padding_line)
            self._staging.wait()
            self._launch_decode(step, key.sampling, BlockTableUpdates([]), _NOTHING)

    def _launch_decode(self, step: HostStep, sampling: Sampling, changes: BlockTableUpdates, kept: Kept) -> Launched:
        count = len(step.counts)
        key = self.grid.key(count, sampling)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._make_frame(key)
        host = frame.staged.host
        lines = (key, self.columns.num_changes, step.rows.tobytes())
        if self._staging.holds != lines:
            fill_lines_of_decode(host, step, self.padding_line)
            self.columns.fill(host)
            self._staging.holds = lines
        fill_places(host, step)
        self._send(frame.staged.end, changes)
        self._graphs.run(key, frame.run)
        return self._read_back(Launched(count, key.num_rows, self._logits[:count] if kept.logits else None))

    def _read_back(self, launched: Launched) -> Launched:
        return launched._replace(readback=self._readback.start(_result_size(launched.num_rows)))

    def _make_frame(self, key: GraphKey) -> _Frame:
        num_rows = key.num_rows
        staged = self._staging.arrange([*token_parts(num_rows, num_rows), *_sampled_parts(num_rows)])
        arrays = staged.device
        ids, tables = self._step_ids[:num_rows], self._step_tables[:num_rows]
        places = arrays["slots"], arrays["query_starts"], arrays["context_lens"]

        def run() -> None:
            step = DeviceStep.of_decode(*places, tables, self._sizes.max_model_len)
            self._take_inputs(ids, tables, arrays)
            hidden = self._decoder.forward(ids, arrays["positions"], step, self._pool)
            logits = self._decoder.logits(hidden, out=self._logits[:num_rows])
            self._sample(logits, arrays, key.sampling)

        return _Frame(staged, run)

    def _launch_mixed(
        self, step: HostStep, sampling: Sampling, changes: BlockTableUpdates, kept: Kept, most_recorded_tokens: int
    ) -> Launched:
        num_tokens, num_sampled = len(step.given_ids), len(step.logit_rows)
        lists = [list_tiles(step.counts, *kind, step.context_lens.tolist()) for kind in self.tile_kinds]
        key = None
        if num_tokens <= most_recorded_tokens:
            key = self.prompts.key(num_tokens, int(step.context_lens.max()), short_runs(lists), step.trees is not None)
        frame = None if key is None else self._prompt_frame(key)
        staged = self._staging.arrange(exact_sizes(step, lists).parts) if frame is None else frame.staged
        sampled = self._staging.arrange(_sampled_parts(num_sampled), staged.end)
        self._staging.holds = None
        fill(staged.host, step, self.padding_line)
        fill_tiles(staged.host, step, lists, self.tile_kinds)
        fill_sampled(sampled.host, step)
        self.columns.fill(sampled.host)
        self._send(sampled.end, changes)
        if frame is None:
            hidden = self._run_exact(step, lists, staged.device)
        else:
            self._graphs.run(key, frame.run)
            hidden = self._hidden[:num_tokens]
        kept_hidden = hidden if kept.hidden else None
        if num_sampled == 0:
            return self._read_back(Launched(hidden=kept_hidden))
        logits = self._decoder.logits(hidden.index_select(0, sampled.device["logit_rows"]))
        self._sample(logits, sampled.device, sampling)
        return self._read_back(Launched(num_sampled, num_sampled, logits if kept.logits else None, kept_hidden))

    def _run_exact(self, step: HostStep, lists: list[TileLists], arrays: Mapping[str, Tensor]) -> Tensor:
        """Launch a step one by one, and return its hidden states."""
        device = self._decoder.device
        ids = torch.empty(len(step.given_ids), dtype=torch.int64, device=device)
        tables = torch.empty(len(step.counts), self._tables.shape[1], dtype=torch.int32, device=device)
        self._take_inputs(ids, tables, arrays)
        device_step = exact_step(step, arrays, tables, lists, self.tile_kinds, self._library)
        return self._decoder.forward(ids, arrays["positions"], device_step, self._pool)

    def _record_prompts(self, key: PromptKey) -> None:
        self._staging.wait()
        self._staging.holds = None
        frame = self._prompt_frame(key)
        nothing, lists = empty_step(), [list_tiles((), *kind, ()) for kind in self.tile_kinds]
        fill(frame.staged.host, nothing, self.padding_line)
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

    def _send(self, start: int, changes: BlockTableUpdates) -> None:
        """Copy the arrays that end at `start` to the device, with those of the changes behind them, and make the changes."""
        if changes.is_empty:
            if start:
                self._staging.send(start)
            return
        staged = self._staging.arrange(changes.parts(), start)
        changes.fill(staged, self._tables.shape[1])
        if staged.end:
            self._staging.send(staged.end)
        arrays = staged.device
        if changes.moves is not None:
            self._pool.move_tokens(arrays["move_sources"], arrays["move_targets"], arrays["move_starts"])
        if changes.block_copies:
            self._pool.copy_blocks(arrays["sources"], arrays["targets"])
        if changes.entries:
            self._tables.view(-1).index_copy_(0, arrays["places"], arrays["blocks"])


def _sampled_parts(num_sampled: int) -> list[Part]:
    return [Part("logit_rows", torch.int64, num_sampled), *option_parts(num_sampled)]


def _first_status(num_rows: int) -> int:
    """Return where the statuses of a result begin, at a multiple of 16 bytes."""
    return num_rows + num_rows % 2


def _result_size(num_rows: int) -> int:
    return _first_status(num_rows) + -(-num_rows // 2)
