"""StepLauncher: launches the steps of a model, or of a draft head, on a GPU, most of them as CUDA graphs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.contracts.model_spec import NO_ATTENTION
from quire.kernels.triton.attention import tile_queries
from quire.kernels.triton.last_token_buffer import gather_inputs_launches
from quire.kernels.triton.launching import run_all
from quire.kernels.triton.step import AddsAdapters, AttentionLibrary, DeviceAttentionMetadata, TileLists, list_tiles
from quire.kernels.triton.tiles import LONG_CHUNK
from quire.kv.device_pool import DeviceKvPool, kv_dtypes
from quire.model.device_decoder import DeviceDecoder
from quire.model.heads.device_head import DeviceHead
from quire.model.lora.device_adapters import AdaptedRows, DeviceAdapters
from quire.worker.device.block_table_updates import BlockTableUpdates, change_parts
from quire.worker.device.device_sampler import DeviceSampler, SampledRows
from quire.worker.device.graphs import CaptureSizes, GraphKey, PromptCaptureSizes, PromptKey, StepGraphs
from quire.worker.device.homes import Homes, by_home, decode_at_home, step_at_home
from quire.worker.device.host_step import (
    HostStep,
    Sampling,
    empty_step,
    fill,
    fill_decode_slots,
    fill_places,
    fill_sampled,
    full_step,
    with_adapters,
)
from quire.worker.device.launched_step import (
    KEEP_NOTHING,
    Frame,
    Kept,
    Launched,
    StepSizes,
    most_staged_bytes,
    sampled_parts,
    table_width,
)
from quire.worker.device.mixed_step import (
    StepShape,
    exact_sizes,
    exact_step,
    fill_tiles,
    most_captured_tokens,
    padded_sizes,
    padded_step,
    short_runs,
    states_of,
    token_parts,
)
from quire.worker.device.sampling_table import SamplingTable
from quire.worker.device.staged_call import ChangeCounts, StagedCall
from quire.worker.device.staging import Part, Staged, Staging, waits_by


class StepLauncher:
    """Has the decoder, its cache, and what CUDA graphs read and write; arranges the arrays of a step, and launches it.

    Batch slots [0, num_slots) belong to sequences, and the last one, padding_slot, to padding. All inputs of a step are
    copied to the GPU in one transfer. Every step samples a token for each of its logit_rows on the GPU, and keeps it there for
    the next step of its batch slot. On a pipeline stage a step is what its layers do; the last stage samples.
    """

    def __init__(
        self,
        decoder: DeviceDecoder | DeviceHead,
        pool: DeviceKvPool,
        sizes: StepSizes,
        graphs: StepGraphs,
        library: AttentionLibrary | None = None,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self._decoder, self._pool, self._sizes, self.graphs, self._adapters = decoder, pool, sizes, graphs, adapters
        self._stage = decoder.stage if isinstance(decoder, DeviceDecoder) else None
        self.samples = self._stage is None or self._stage.stage.is_last
        self._library = library  # attends in steps without a CUDA graph; with a library all steps with prompts are such
        device, spec = decoder.device, decoder.spec
        self.has_states = spec.has_recurrent_state
        self._has_windows = pool.spec.window_tokens is not None
        self.first_window_block = pool.num_blocks if self._has_windows else None
        self.padding_slot, self._homes = sizes.num_slots, Homes.of(decoder)
        wait = waits_by(weakref.WeakMethod(self._wait_for))  # no cycle: what is closed is freed at once
        self._sampler = DeviceSampler(sizes, spec.vocab_size, device, wait, self.samples)
        captures_prompts = graphs.is_enabled and library is None and decoder.captures_prompts
        specs = [spec] if decoder.ranks is None else decoder.ranks.specs  # on all ranks steps have the same arrays
        if self._stage is not None:
            specs = self._stage.rank_specs
            self._stage.reserve_rows(max(sizes.max_num_batched_tokens, sizes.max_num_seqs), decoder.dtype, device)
        most = sizes.max_num_seqs
        if decoder.ranks is not None and decoder.ranks.context is not None and decoder.is_in_order:
            most = min(most, decoder.ranks.context.most_captured(specs, sizes.max_model_len))
        self.capture_sizes = CaptureSizes(most, self._sampler.samplings, self._homes.size)
        most_captured = min(most_captured_tokens(each, sizes.max_num_batched_tokens) for each in specs)
        # With homes steps with prompts are not captured: each home would be padded to the tokens that one may have.
        most_tokens = most_captured if captures_prompts and self._homes.size == 1 else 0
        lengths = sorted({min(LONG_CHUNK, sizes.max_model_len), sizes.max_model_len})
        self.prompts = PromptCaptureSizes(most_tokens, lengths, sizes.has_drafts, sizes.has_trees)
        width = table_width(sizes.max_model_len, pool.spec)
        self.tables = torch.zeros(sizes.num_slots + 1, width, dtype=torch.int32, device=device)
        most = self.capture_sizes.max_rows
        most_in_step = self._homes.size * most
        # What CUDA graphs read and write in addition to their staged arrays.
        most_slots = max(most_in_step, min(sizes.max_num_seqs, most_tokens) + 1)
        self._step_tables = torch.zeros(most_slots, width, dtype=torch.int32, device=device)
        self._step_ids = torch.zeros(max(most_in_step, most_tokens), dtype=torch.int64, device=device)
        most_rows = (most_tokens, most) if self.samples else (0, 0)
        self._hidden = torch.empty(most_rows[0], spec.hidden_size, dtype=decoder.dtype, device=device)
        self._logits = torch.empty(most_rows[1], spec.vocab_size, dtype=decoder.dtype, device=device)
        # With layers in two formats every part of the model, as a stage may be, has the tiles of both.
        formats = {pool.spec.dtype, *((spec.dtype,) if pool.spec.layer_dtypes else ())}
        attention = [layer.attention for each in specs for layer in each.layers if layer.attention != NO_ATTENTION]
        kinds = itertools.product(attention, (kv_dtypes(name)[0] for name in formats))
        self.tile_kinds = sorted({tile_queries(each, decoder.dtype, kv, decoder.is_in_order) for each, kv in kinds})
        # With homes each rank lists the tiles of its own sequences.
        self._staged_kinds = self.tile_kinds if self._homes.size == 1 else []
        of_model = self.has_states, width, self._has_windows, spec.vocab_size, self._homes.size
        num_bytes = most_staged_bytes(sizes, self.prompts, self._staged_kinds, *of_model)
        self.staging = Staging(num_bytes, device, wait, sizes.num_stages)
        self.frames: dict[GraphKey | PromptKey, Frame] = {}

    @property
    def decoder(self) -> DeviceDecoder | DeviceHead:
        """The model, or draft head, whose steps it runs."""
        return self._decoder

    @property
    def sampling_table(self) -> SamplingTable:
        """How each batch slot is sampled."""
        return self._sampler.table

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """How its steps may be sampled, what takes most memory first."""
        return self._sampler.samplings

    @property
    def lasting_tensors(self) -> list[Tensor]:
        """What CUDA graphs write in addition to their staged arrays and the cache."""
        return [self._hidden, self._logits, *self._sampler.lasting_tensors]

    @property
    def kv_pool(self) -> DeviceKvPool:
        """The cache of the decoder."""
        return self._pool

    def _wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event of the device."""
        event.synchronize()

    def _use(self, pool: DeviceKvPool) -> None:
        """Take a pool of the same spec as the cache."""
        self._pool = pool
        self.first_window_block = pool.num_blocks if self._has_windows else None

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        self.frames.clear()
        self.staging.holds = None

    def launch(
        self, step: HostStep | None, sampling: Sampling, changes: BlockTableUpdates, kept: Kept = KEEP_NOTHING
    ) -> Launched:
        """Launch the changes, and then a step if there is one; return before the device is done."""
        self._send_processors()
        self.staging.wait()
        if step is None:
            self.staging.holds = None
            self._call(StagedCall(ChangeCounts.of(changes)), 0, changes)
            return self._read_back(Launched())
        is_padded = step.is_decode and not kept.hidden and len(step.counts) <= self.capture_sizes.max_rows
        if is_padded:
            return self._launch_decode(step, sampling, changes, kept)
        return self.launch_mixed(step, sampling, changes, kept, self.prompts.max_tokens)

    def _send_processors(self) -> None:
        """Send the logits processors of new sequences, ahead of the step that samples them first."""
        for update in self._sampler.take_updates():
            self.staging.wait()
            self.staging.holds = None
            changes = BlockTableUpdates([], processors=update)
            self._call(StagedCall(ChangeCounts.of(changes)), 0, changes)

    def read_sampled(self, launched: Launched) -> tuple[list[int], list[int]]:
        """Wait for a step; return its next tokens, -1 where there is none, and their statuses. See read_rows."""
        found = self.read_rows(launched)
        return found.tokens, found.statuses

    def read_rows(self, launched: Launched) -> SampledRows:
        """Wait for a step, and return what it has found.

        To be called before max_in_flight more steps are launched. Another one may have been launched already.
        """
        return self._sampler.read(launched.readback, launched.num_sampled, launched.num_rows, launched.sampling)

    def run_full(self, num_tokens: int, num_sequences: int, context_len: int) -> None:
        """Run a step of padding of that size, one by one, with all of its launches; see host_step.full_step."""
        num_short = max((most for _, most in self.tile_kinds), default=1)  # a model of recurrent layers alone has none
        step = full_step(num_tokens, num_sequences, context_len, self.padding_slot, num_short, self._sizes.max_num_drafts)
        step = with_adapters(step, self._adapters is not None)
        self.staging.wait()
        self.launch_mixed(step, self.samplings[0], BlockTableUpdates([]), KEEP_NOTHING, 0)

    @property
    def keys(self) -> list[GraphKey | PromptKey]:
        """The kinds of steps that are captured, what takes most memory first, of those with prompts and of the others."""
        return [*self._with_adapters(self.prompts.keys), *self._with_adapters(self.capture_sizes.keys)]

    def _with_adapters(self, keys: Sequence[GraphKey | PromptKey]) -> list[GraphKey | PromptKey]:
        """Return kinds of steps, and if some may have LoRA adapters, these before the others."""
        adapted = [] if self._adapters is None else [key._replace(has_adapters=True) for key in keys]
        return [*adapted, *keys]

    def capture_largest(self) -> None:
        """Capture and run steps of padding that take as much memory as any, so that it is there for others."""
        for keys in (self._with_adapters(self.prompts.keys), self._with_adapters(self.capture_sizes.keys)):
            self._capture_and_run(keys[:1])

    def capture_samples(self) -> None:
        """Do the same with steps of every sort: what takes most memory, least, and as much as half of the kinds."""
        self.capture_largest()
        for keys in (self._with_adapters(self.prompts.keys), self._with_adapters(self.capture_sizes.keys)):
            self._capture_and_run([*keys[len(keys) // 2 :][:1], *keys[-1:]])

    def capture_copies(self, count: int) -> None:
        """Capture the step with most launches so many times more, and run each."""
        for key in self.keys[:1]:
            self.capture(key)  # what they read is on the device then
            self.graphs.capture_more(key, self.frames[key].run, count)

    def _capture_and_run(self, keys: Sequence[GraphKey | PromptKey]) -> None:
        for key in keys:
            self.capture(key)
            self.capture(key)  # its first launch takes memory, too

    def capture(self, key: GraphKey | PromptKey) -> None:
        """Run a step of padding: captured if it was before, else it is captured."""
        if isinstance(key, PromptKey):
            self._capture_prompts(key)
        else:
            # Launches do not depend on lengths, and the shortest take least time.
            step = with_adapters(full_step(key.num_rows, key.num_rows, 1, self.padding_slot), key.has_adapters)
            if key.home_rows:
                step = replace(step, homes=np.arange(key.num_rows) // key.home_rows)
            self.staging.wait()
            self._launch_decode(step, key.sampling, BlockTableUpdates([]), KEEP_NOTHING)

    def _launch_decode(self, step: HostStep, sampling: Sampling, changes: BlockTableUpdates, kept: Kept) -> Launched:
        count, order = len(step.counts), None
        if self._homes.size > 1:
            key = self.capture_sizes.key(count, sampling, int(np.bincount(self._homes.homes_of(step)).max()))
            step, order = by_home(step, self._homes, self.padding_slot, key.home_rows)
        else:
            key = self.capture_sizes.key(count, sampling)._replace(has_adapters=step.adapters is not None)
        frame = self._decode_frame(key)
        host = frame.staged.host
        own = b"" if step.adapters is None else step.adapters.tobytes()
        own += b"" if order is None else order.places.tobytes()
        slots = (key, self.sampling_table.num_changes, step.rows.tobytes(), own)
        if self.staging.holds != slots:
            fill_decode_slots(host, step, self.padding_slot)
            if order is not None:
                order.fill(host)
            self.sampling_table.fill(host)
            self.staging.holds = slots
        fill_places(host, step)
        call = StagedCall(ChangeCounts.of(changes), key, None, sampling, key.num_rows)
        self._call(call, frame.staged.end, changes)
        keeps_logits = kept.logits or sampling == "deferred"
        launched = Launched(count, key.num_rows, self._logits[:count] if keeps_logits else None)
        if sampling == "deferred":
            return launched._replace(deferred=(step.sampled_rows, step.sample_positions))
        return self._read_back(launched, sampling, step.sampled_rows)

    def _read_back(
        self, launched: Launched, sampling: Sampling = "plain", batch_slots: NDArray[np.int32] | None = None
    ) -> Launched:
        place = self._sampler.start_readback(launched.num_rows, sampling)
        is_processed = None
        if sampling == "full" and batch_slots is not None:
            is_processed = self.sampling_table.is_processed(batch_slots)
        return launched._replace(readback=place, sampling=sampling, is_processed=is_processed)

    def _decode_frame(self, key: GraphKey) -> Frame:
        """Return the arrays of the CUDA graph of a step of as many sequences as tokens, and its launches."""
        frame = self.frames.get(key)
        if frame is not None:
            return frame
        num_rows = key.num_rows
        num_tokens = self._homes.size * key.home_rows or num_rows
        parts = token_parts(num_tokens, num_tokens, self.has_states, key.has_adapters, self._has_windows)
        if key.home_rows:
            parts.append(Part("home_places", torch.int64, num_rows))
        staged = self.staging.arrange([*parts, *sampled_parts(num_rows, key.sampling)])
        arrays = staged.device
        ids, tables = self._step_ids[:num_tokens], self._step_tables[:num_tokens]
        places = arrays["slots"], arrays["query_starts"], arrays["context_lens"]

        def run() -> None:
            of_sequences = self._halves(tables)[0], self._sizes.max_model_len, states_of(arrays)
            step = self._completed(DeviceAttentionMetadata.of_decode(*places, *of_sequences), arrays, tables)
            self._take_inputs(ids, tables, arrays)
            if key.home_rows:
                step = decode_at_home(step, arrays["home_places"], self._homes)
            hidden = self._decoder.forward(ids, arrays["positions"], step, self._pool)
            if not self.samples:
                return
            logits = self._logits_of(hidden, step.lora, self._logits[:num_rows])
            if key.sampling != "deferred":
                self._sampler.sample(logits, arrays, key.sampling)

        frame = self.frames[key] = Frame(staged, run)
        return frame

    def launch_mixed(
        self, step: HostStep, sampling: Sampling, changes: BlockTableUpdates, kept: Kept, most_captured_tokens: int
    ) -> Launched:
        num_tokens, num_sampled, order = len(step.given_ids), len(step.logit_rows), None
        if self._homes.size > 1:
            step, order = by_home(step, self._homes, self.padding_slot)
        lists = [list_tiles(step.counts, *kind, step.context_lens.tolist()) for kind in self._staged_kinds]
        key = None
        if num_tokens <= most_captured_tokens:
            key = self.prompts.key(num_tokens, int(step.context_lens.max()), short_runs(lists), step.trees is not None)
            key = None if key is None else key._replace(has_adapters=step.adapters is not None)
        shape = StepShape.of(step, () if order is None else order.sequences) if key is None else None
        call = StagedCall(ChangeCounts.of(changes), key, shape, sampling, num_sampled, kept.hidden)
        staged, sampled = self._arrange_mixed(call, lists)
        self.staging.holds = None
        fill(staged.host, step, self.padding_slot)
        fill_tiles(staged.host, step, lists, self._staged_kinds)
        if order is not None:
            order.fill(staged.host)
        fill_sampled(sampled.host, step)
        self.sampling_table.fill(sampled.host)
        logits, hidden = self._call(call, sampled.end, changes, lists)
        kept_hidden = hidden[:num_tokens] if kept.hidden and hidden is not None else None
        if num_sampled == 0:
            return self._read_back(Launched(hidden=kept_hidden, adapters=step.adapters))
        keeps_logits = kept.logits or sampling == "deferred"
        launched = Launched(num_sampled, num_sampled, logits if keeps_logits else None, kept_hidden, adapters=step.adapters)
        if sampling == "deferred":
            return launched._replace(deferred=(step.sampled_rows, step.sample_positions))
        return self._read_back(launched, sampling, step.sampled_rows)

    def _call(
        self, call: StagedCall, start: int, changes: BlockTableUpdates, lists: Sequence[TileLists] = ()
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write the changes after the arrays of a step, which end at `start`, and launch; returns what run_staged does."""
        end = start
        if not changes.is_empty:
            staged = self.staging.arrange(changes.parts(), start)
            changes.fill(staged, self.tables.shape[1])
            end = staged.end
        self._publish(call, self.staging.host_bytes[:end])
        return self.run_staged(call, lists)

    def _publish(self, call: StagedCall, staged: NDArray[np.uint8]) -> None:
        """Tell other ranks what is launched now, with the bytes of the staging buffer; here there are none."""

    def run_staged(self, call: StagedCall, lists: Sequence[TileLists] = ()) -> tuple[Tensor | None, Tensor | None]:
        """Send what is in the staging buffer, and launch a call; return the logits and the hidden states of its step.

        lists  the tiles of a step without a graph; none: they are found
        Logits are None where it samples nothing. Hidden states are None of a captured decode step, and may have padding.
        """
        if isinstance(call.key, GraphKey):
            frame = self._decode_frame(call.key)
            self._send(frame.staged.end, call.changes)
            self.graphs.run(call.key, frame.run, self._exchange(call.key.num_rows))
            return self._logits[: call.key.num_rows], None
        if call.key is None and call.shape is None:
            self._send(0, call.changes)
            return None, None
        if call.shape is not None and not lists:
            lists = [list_tiles(call.shape.counts, *kind, call.shape.context_lens) for kind in self._staged_kinds]
        staged, sampled = self._arrange_mixed(call, lists)
        self._send(sampled.end, call.changes)
        exchange = self._exchange(len(staged.device["positions"]))
        if call.key is not None:
            self.graphs.run(call.key, self._prompt_frame(call.key).run, exchange)
            hidden = self._hidden
        else:
            with exchange:
                hidden = self._run_exact(call, lists, staged.device)
        if call.num_sampled == 0 or not self.samples:
            return None, hidden
        rows = sampled.device["logit_rows"]
        numbers = staged.device.get("adapters")
        lora = None if numbers is None else self._adapted_rows(numbers.index_select(0, rows))
        logits = self._logits_of(hidden.index_select(0, rows), lora)
        if call.sampling != "deferred":
            self._sampler.sample(logits, sampled.device, call.sampling)
        return logits, hidden

    def _exchange(self, count: int) -> AbstractContextManager[None]:
        """Receive the rows of a step, padding included, and send them on, where the layers are those of a pipeline stage."""
        return nullcontext() if self._stage is None else self._stage.exchange(count)

    def fill_staging(self, staged: NDArray[np.uint8]) -> None:
        """Take over what another rank has in its staging buffer, before run_staged."""
        self.staging.wait()
        self.staging.holds = None
        self.staging.host_bytes[: len(staged)] = staged

    def kept(self, rows: Tensor) -> Tensor:
        """Return what is kept of a step until it is collected: with stages a copy, as other steps overwrite the arrays of CUDA
        graphs before that."""
        return rows if self._stage is None else rows.clone()

    def logits_of(self, hidden: Tensor, adapters: NDArray[np.int32] | None) -> Tensor:
        """Return the logits of rows of hidden states; adapters: of these, see HostStep."""
        numbers = None if adapters is None else torch.from_numpy(adapters).to(self._decoder.device)
        return self._logits_of(hidden, None if numbers is None else self._adapted_rows(numbers))

    def _arrange_mixed(self, call: StagedCall, lists: Sequence[TileLists]) -> tuple[Staged, Staged]:
        """Return the arrays of a step with prompts, and of the tokens of it that get a next one."""
        if isinstance(call.key, PromptKey):
            staged = self._prompt_frame(call.key).staged
        elif call.shape is not None:
            parts = exact_sizes(call.shape, lists, self.has_states, self._has_windows).parts
            staged = self.staging.arrange([*parts, *call.shape.parts])
        else:
            raise InvariantError("a step with prompts is captured, or has a shape")
        return staged, self.staging.arrange(sampled_parts(call.num_sampled, call.sampling), staged.end)

    def _run_exact(self, call: StagedCall, lists: Sequence[TileLists], arrays: Mapping[str, Tensor]) -> Tensor:
        """Launch a step one by one, and return its hidden states."""
        device, shape = self._decoder.device, call.shape
        if shape is None:
            raise InvariantError("a step that is launched one by one has a shape")
        ids = torch.empty(sum(shape.counts), dtype=torch.int64, device=device)
        tables = torch.empty(len(shape.counts), self.tables.shape[1], dtype=torch.int32, device=device)
        self._take_inputs(ids, tables, arrays)
        if shape.home_sequences:
            own_step = step_at_home(shape, arrays, tables, self._homes, self._library)
            return self._decoder.forward(ids, arrays["positions"], own_step, self._pool)
        device_step = exact_step(shape, arrays, self._halves(tables)[0], lists, self.tile_kinds, self._library)
        return self._decoder.forward(ids, arrays["positions"], self._completed(device_step, arrays, tables), self._pool)

    def _capture_prompts(self, key: PromptKey) -> None:
        self.staging.wait()
        self.staging.holds = None
        frame = self._prompt_frame(key)
        nothing, lists = with_adapters(empty_step(), key.has_adapters), [list_tiles((), *kind, ()) for kind in self.tile_kinds]
        fill(frame.staged.host, nothing, self.padding_slot)
        fill_tiles(frame.staged.host, nothing, lists, self.tile_kinds)
        self.staging.send(frame.staged.end)
        self.graphs.run(key, frame.run, self._exchange(key.num_tokens))

    def _prompt_frame(self, key: PromptKey) -> Frame:
        """Return the arrays of the CUDA graph of a step with prompts; those of the sampled tokens follow them."""
        frame = self.frames.get(key)
        if frame is not None:
            return frame
        sizes = padded_sizes(key, self._sizes.max_num_seqs, self.tile_kinds, self.has_states, self._has_windows)
        staged = self.staging.arrange(sizes.parts)
        arrays = staged.device
        ids, tables = self._step_ids[: sizes.num_tokens], self._step_tables[: sizes.num_sequences]

        def run() -> None:
            step = padded_step(key, arrays, self._halves(tables)[0], self.tile_kinds)
            step = self._completed(step, arrays, tables)
            self._take_inputs(ids, tables, arrays)
            hidden = self._decoder.forward(ids, arrays["positions"], step, self._pool)
            if self.samples:
                self._hidden[: len(hidden)].copy_(hidden)

        frame = self.frames[key] = Frame(staged, run)
        return frame

    def _completed(
        self, step: DeviceAttentionMetadata, arrays: Mapping[str, Tensor], tables: Tensor
    ) -> DeviceAttentionMetadata:
        """Return a step with the tokens that have LoRA adapters, and the places of the window group, if there are any."""
        numbers = arrays.get("adapters")
        step = step if numbers is None else replace(step, lora=self._adapted_rows(numbers))
        return step.with_windows(arrays["window_slots"], self._halves(tables)[1]) if self._has_windows else step

    def _halves(self, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block tables of the full group, and of the window group, if there is one."""
        half = tables.shape[1] // 2
        return (tables[:, :half], tables[:, half:]) if self._has_windows else (tables, tables)

    def _adapted_rows(self, numbers: Tensor) -> AdaptedRows:
        """Return rows that have these adapters, see DeviceAdapters.rows."""
        if self._adapters is None:
            raise InvariantError("a step has adapters, and the decoder takes none")
        return self._adapters.rows(numbers)

    def _logits_of(self, hidden: Tensor, lora: AddsAdapters | None, out: Tensor | None = None) -> Tensor:
        """Return the logits of rows of hidden states, with what their adapters add."""
        if lora is None or isinstance(self._decoder, DeviceHead):
            return self._decoder.logits(hidden, out=out)
        return self._decoder.logits(hidden, out, lora)

    def _take_inputs(self, ids: Tensor, tables: Tensor, arrays: Mapping[str, Tensor]) -> None:
        rows = arrays["token_rows"], arrays["rows"]
        run_all(gather_inputs_launches(ids, tables, arrays["given_ids"], *rows, self._sampler.last_ids, self.tables))

    def _send(self, start: int, changes: ChangeCounts) -> None:
        """Copy the arrays that end at `start` to the device, with those of the changes after them, and make the changes."""
        if changes.is_empty:
            if start:
                self.staging.send(start)
            return
        staged = self.staging.arrange(change_parts(*changes), start)
        arrays = staged.device
        if self._homes.size > 1:
            pool = self._pool.num_blocks, self._pool.spec.block_size
            changes, arrays = self._homes.own_changes(staged, changes, pool)
        if staged.end:
            self.staging.send(staged.end)
        if changes.num_processor_rows or changes.num_processor_words:
            self._sampler.update(arrays)
        if changes.num_moved:
            self._pool.move_tokens(arrays["move_sources"], arrays["move_targets"], arrays["move_starts"])
        if changes.num_window_moves:
            moved = arrays["window_move_sources"], arrays["window_move_targets"], arrays["move_starts"]
            self._pool.move_tokens(*moved, is_windowed=True)
        if changes.num_window_copies:
            self._pool.copy_blocks(arrays["window_sources"], arrays["window_targets"], is_windowed=True)
        if changes.num_copies:
            self._copy_blocks(arrays["sources"], arrays["targets"])
        if changes.num_state_copies:
            self._pool.copy_states(arrays["state_starts"], arrays["state_targets"])
        if changes.num_entries:
            self.tables.view(-1).index_copy_(0, arrays["places"], arrays["blocks"])

    def _copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks of the full group; where ranks share the tokens of sequences, this rank's."""
        ranks = self._decoder.ranks
        if ranks is not None and ranks.context is not None:
            num_blocks = self._pool.num_blocks - 1  # one is spare
            sources, targets = (ranks.context.own_blocks(blocks, num_blocks) for blocks in (sources, targets))
        self._pool.copy_blocks(sources, targets)
