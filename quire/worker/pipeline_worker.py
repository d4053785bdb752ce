"""The process of a pipeline stage: loads its layers, and computes the steps that the leader sends, after the stage before.

Run by the leader as `python -m quire.worker.pipeline_worker`, see quire.parallel.launch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.numa import bind_rank_to_numa_node
from quire.contracts.config import EngineConfig
from quire.contracts.memory import MemoryPlan
from quire.kernels.native import load_native
from quire.kernels.reference.recurrent import StateRows
from quire.kv.page_supply import PageSupply
from quire.kv.pool import KvPool
from quire.kv.tiers.host_slab import HostSlab, PagePart
from quire.model.resolve import resolve_model
from quire.model.stage_decoder import StageDecoder, StageOutputs
from quire.model.token_runs import TokenRuns, address_of
from quire.parallel.barrier import ProcessBarrier
from quire.parallel.launch import WorkerContext, run_worker
from quire.parallel.message_socket import ConnectionMonitor
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.ring import RingMessage
from quire.speculate.proposer import DraftInput
from quire.worker.parallel_build import check_rank_memory, threads_of_host
from quire.worker.parallel_launch import own_fingerprint
from quire.worker.parallel_messages import (
    Call,
    Changes,
    StepCall,
    change_model,
    decode_changes,
    decode_page_moves,
    decode_step,
)
from quire.worker.pipeline_join import StageMeans, meet_stages
from quire.worker.pipeline_link import Block
from quire.worker.pipeline_memory import PipelineMemory
from quire.worker.pipeline_messages import request_slot, step_number, step_reads
from quire.worker.pipeline_stage import StageConfig, StagePlace, build_stage
from quire.worker.state_table import StateTable
from quire.worker.step_executor import StepTokens


def main(context: WorkerContext) -> None:
    """Load the stage, then execute the leader's messages until it closes the group."""
    config = StageConfig.from_json(context.config)
    place, index, is_remote = config.places[context.rank], context.rank - config.first_rank, context.exchange is not None
    if place.num_tensor_ranks > 1 and not is_remote:
        bind_rank_to_numa_node(index, config.num_threads)
    if is_remote and isinstance(context.own, EngineConfig):
        config = replace(config, folder=str(resolve_model(context.own.model, context.own.revision)))  # of this host
        torch.set_num_threads(threads_of_host(context.own.num_threads, context.num_on_host or 1))
    else:
        torch.set_num_threads(config.num_threads[index])
    if config.options:
        context.startup.stage("comparing ranks")
        check_fingerprints(context.communicator, own_fingerprint(context.own, Path(config.folder), config.options))
        check_stage_memory(config, index)
    if is_remote:
        config = replace(config, slots_file=-1)  # of the leader's host
        means = meet_stages(config, context.rank, context.barrier, context.communicator)
        if isinstance(context.monitor, ConnectionMonitor):
            context.monitor.watch_barriers(means.barriers.values())
    else:
        rows_file = context.open_descriptor(config.rows_files[place.stage.index]) if config.rows_files else None
        means = StageMeans(PipelineMemory(context.memory, config.sizes), None, context.subgroups, rows_file)
        if config.slots_file >= 0:
            config = replace(config, slots_file=context.open_descriptor(config.slots_file))
    context.startup.stage(f"loading weights of {place.describe()}")
    decoder, plan, part = build_stage(config, place, means.barriers, means.rows_file)
    executor = StageExecutor(decoder, plan, config, place, means, context.barrier)
    executor.open_host_tier(config.num_host_pages, part)
    context.startup.ready({"packed_weight_bytes": decoder.weight_bytes, "spared_weight_bytes": executor.spared_bytes})
    try:
        while True:
            message = context.ring.receive()
            if message is None:
                continue
            if not executor.follow(Call(int(message.header[0]))):
                executor.make_call(message)
                continue
            context.communicator.barrier()  # the leader waits in it
    finally:
        executor.close()


def check_stage_memory(config: StageConfig, rank: int) -> None:
    """Raise ConfigError where this host has not the memory that a process needs which a launcher has started."""
    check_rank_memory(config.needed_bytes, rank, "stages, or give this one fewer layers (pipeline_layers)")


class StageExecutor:
    """Computes the layers of one stage, or a rank's part of them. The first rank of a stage writes the results, and says when a
    step is computed.

    means    what it shares with other processes
    barrier  of this process
    """

    def __init__(
        self,
        decoder: StageDecoder,
        plan: MemoryPlan,
        config: StageConfig,
        place: StagePlace,
        means: StageMeans,
        barrier: ProcessBarrier,
    ) -> None:
        self._own_expert_tokens = means.memory.expert_tokens(decoder.stage.start, decoder.stage.stop)
        self._means, self._kept_parts = means, [config.kept_part(stage) for stage in config.stages]
        self._decoder, self._stage, self._memory, self._barrier = decoder, decoder.stage, means.memory, barrier
        self._is_first_rank = place.is_first_rank
        self._kept, self._num_kept = config.kept_part(decoder.stage), len(config.kept_layers)
        self._native = load_native()
        self._kv = KvPool(plan.kv, plan.num_kv_blocks, plan.num_states, num_window_blocks=plan.num_window_blocks)
        self._states = StateTable(config.num_batch_slots, plan.num_states, plan.num_state_checkpoints, copies_starts=True)
        self._pages = PageSupply(self._kv)
        self._pages.start()
        self._block_tables = np.zeros((config.num_batch_slots, plan.table_width), dtype=np.int64)
        self._tables = list(self._block_tables)
        self._addresses = [address_of(table) for table in self._tables]
        self._first_stop = config.stages[0].stop
        self._row_adapters: dict[int, NDArray[np.int32] | None] = {}  # of the last step in each slot
        self._num_answers = 0
        self._slab: HostSlab | None = None
        self._num_checkpoints = plan.num_state_checkpoints

    @property
    def spared_bytes(self) -> int:
        """See NativeDecoder.spared_bytes; of the last stage."""
        return self._decoder.spared_bytes if self._stage.is_last else 0

    def open_host_tier(self, num_pages: int, part: PagePart | None) -> None:
        """Map the pages of the host tier, if it has any; part: None: pages of these layers alone."""
        if num_pages > 0:
            self._slab = HostSlab(self._kv, num_pages, part=part, num_checkpoints=self._num_checkpoints)

    def follow(self, call: Call) -> bool:
        """Make a call that the leader waits for; return whether it was such a call."""
        if call is Call.SLEEP:
            self._pages.close()
            self._kv.drop()
        elif call is Call.WAKE_UP:
            self._pages = PageSupply(self._kv)
            self._pages.start()
        else:
            return call is Call.WAIT
        return True

    def make_call(self, message: RingMessage) -> None:
        """Make one call of the leader."""
        call = Call(int(message.header[0]))
        with self._pages:
            if call is Call.STEP:
                self._run(step_number(message), decode_step(message), step_reads(message))
            elif call is Call.CHANGES:
                self._change(decode_changes(message))
            elif call is Call.MOVE_TOKENS:
                sources, targets = (torch.from_numpy(array.astype(np.int64)) for array in message.arrays)
                self._decoder.move_tokens(self._kv, sources, targets)
            elif call is Call.MOVE_PAGES and self._slab is not None:
                self._slab.move(*decode_page_moves(message))
            elif call in (Call.LOGITS, Call.HIDDEN_STATES):
                if self._stage.is_last:
                    self._answer(call, request_slot(message), message.arrays[0].tolist())
            else:
                change_model(message, self._decoder.adapters, own_part=self._stage.adapter)

    def _change(self, changes: Changes) -> None:
        """Change block tables, and copy blocks."""
        context, copies = self._decoder.context, changes.block_copies
        for batch_slot, index, block_ids in changes.entries:
            self._block_tables[batch_slot, index : index + len(block_ids)] = block_ids
            self._pages.use(block_ids if context is None else context.local(block_ids))
        if context is not None:
            # Both blocks of a copy have the same index in their tables, and so are on the same rank.
            copies = list(zip(*(context.local(ids) for ids in zip(*copies, strict=True)), strict=True))
        if copies:
            self._kv.copy_blocks(tuple(copies))

    def _run(self, number: int, step: StepCall, reads: Sequence[DraftInput]) -> None:
        """Compute a step, after the stage before has."""
        tokens, slot = step.tokens, self._memory.slot(number)
        runs = TokenRuns(
            tokens.token_ids,
            tokens.starts,
            tokens.ends,
            [self._tables[batch_slot] for batch_slot in tokens.batch_slots],
            [self._addresses[batch_slot] for batch_slot in tokens.batch_slots],
            tokens.trees,
            tokens.short_ropes,
            None if tokens.states is None else self._place_states(tokens),
            tokens.adapters,
            bounds=tokens.bounds,
        )
        if not self._stage.is_first:
            self._barrier.wait_for_counter(self._memory.counter(self._stage.index - 1), number + 1)
        began_s = time.perf_counter()
        count = len(tokens.logit_rows)
        outputs = None
        if self._stage.is_last:
            outputs = StageOutputs(
                tokens.logit_rows + step.hidden_rows,
                count,
                step.keeps_all or "final" in reads,
                step.wants_best,
                step.needs_logits,
                self._memory.logits(slot, count).data_ptr(),
            )
        self._row_adapters[slot] = self._decoder.row_adapters(runs)
        best = self._decoder.run_stage(runs, self._kv, self._memory.rows(slot), outputs)
        if not self._is_first_rank:
            return
        if step.wants_best and self._stage.is_last:
            self._memory.best(slot, count)[:] = best
        if reads:
            self._write_features(slot, tokens, reads, outputs)
        tokens_of_experts = self._own_expert_tokens
        if len(tokens_of_experts):
            self._decoder.plan.copy_expert_tokens(tokens_of_experts.ctypes.data, len(tokens_of_experts))
        self._memory.note_busy(self._stage.index, time.perf_counter() - began_s)
        blocks = [] if self._means.links is None else self._step_blocks(slot, step, reads, best)
        self._advance(self._memory.counter(self._stage.index), number + 1, blocks)

    def _place_states(self, tokens: StepTokens) -> StateRows:
        rows = self._states.place(tokens)
        self._kv.copy_states(self._states.take_copies())
        return rows

    def _write_features(self, slot: int, tokens: StepTokens, reads: Sequence[DraftInput], outputs: StageOutputs | None) -> None:
        """Write what draft heads in the leader read of the step: the inputs of layers, then hidden states of all tokens or of
        those with logits."""
        count, hidden_size = len(tokens.token_ids), self._decoder.spec.hidden_size
        if "layers" in reads and self._kept:
            out = self._memory.features(slot, self._kept.start * hidden_size, len(self._kept) * hidden_size, count)
            self._decoder.write_layer_inputs(count, out.data_ptr())
        if outputs is None:
            return
        for index, what in enumerate(("final", "last")):
            if what in reads:
                rows = tokens.logit_rows if outputs.keeps_all else list(range(outputs.num_logits))
                rows = list(range(count)) if what == "final" else rows
                out = self._memory.features(slot, (self._num_kept + index) * hidden_size, hidden_size, len(rows))
                self._decoder.write_hidden_states(self._memory.rows(slot), rows, out.data_ptr())

    def _answer(self, call: Call, slot: int, places: list[int]) -> None:
        """Compute what the leader has asked for: logits on all ranks, hidden states on the first one, which has whole rows."""
        began_s = time.perf_counter()
        rows, spec = self._memory.rows(slot), self._decoder.spec
        out = self._memory.answer(len(places), spec.vocab_size if call is Call.LOGITS else spec.hidden_size)
        if call is Call.LOGITS:
            self._decoder.write_logits(rows, places, out.data_ptr(), self._row_adapters.get(slot))
        elif self._is_first_rank:
            self._decoder.write_hidden_states(rows, places, out.data_ptr())
        if not self._is_first_rank:
            return
        self._memory.note_busy(self._stage.index, time.perf_counter() - began_s)
        self._num_answers += 1
        self._advance(self._memory.answer_counter, self._num_answers, [(out.data_ptr(), out.nbytes)])

    def _step_blocks(self, slot: int, step: StepCall, reads: Sequence[DraftInput], best: Sequence[int]) -> list[Block]:
        """Return what the next process needs of a step: the rows, or results, and what is for the leader."""
        memory, index, size = self._memory, self._stage.index, self._decoder.spec.hidden_size
        num_tokens, num_logits = len(step.tokens.token_ids), len(step.tokens.logit_rows)
        features: list[Tensor] = []
        for part in self._kept_parts[: index + 1] if "layers" in reads else ():
            features.append(memory.features(slot, part.start * size, len(part) * size, num_tokens))
        if not self._stage.is_last:
            blocks = [(memory.rows(slot), num_tokens * memory.row_bytes)]
        else:
            for place, (what, count) in enumerate((("final", num_tokens), ("last", num_logits))):
                if what in reads:
                    features.append(memory.features(slot, (self._num_kept + place) * size, size, count))
            found = memory.best(slot, num_logits)
            blocks = [(found.ctypes.data, found.nbytes)]
            if step.needs_logits or not step.wants_best or min(best, default=0) < 0:
                logits = memory.logits(slot, num_logits)
                blocks.append((logits.data_ptr(), logits.nbytes))
        return blocks + [(each.data_ptr(), each.nbytes) for each in features if each.nbytes]

    def _advance(self, counter: int, value: int, blocks: Sequence[Block]) -> None:
        """Say that something is computed, here and, where memory is not shared, with what it is, to the next process."""
        assert self._native is not None
        self._native.advance_counter(counter, value & 0xFFFFFFFF)
        links = self._means.links
        if links is not None:
            # That of stage 0 is in the leader's process.
            busy = [(self._memory.busy_address(stage), 8) for stage in range(1, self._stage.index + 1)]
            counts = self._memory.expert_tokens(self._first_stop, self._stage.stop)
            experts = [(counts.ctypes.data, counts.nbytes)] if self._stage.index and counts.nbytes else []
            links.push([*busy, *experts, *blocks], counter, value)

    def close_links(self) -> None:
        """Close the connections to other stages; may be called again."""
        self._means.close_links()

    def close(self) -> None:
        """Release the weights and the KV pool."""
        self._pages.close()
        self._slab = None
        self.close_links()
        del self._decoder, self._kv


if __name__ == "__main__":
    sys.exit(run_worker(main))
