"""The process of a tensor-parallel worker: loads its shard of the model, and makes the calls that the leader makes.

Run by the leader as `python -m quire.worker.parallel_worker`, see quire.parallel.launch.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from quire.base.numa import bind_rank_to_numa_node
from quire.contracts.config import EngineConfig
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenSteps
from quire.model.resolve import resolve_model
from quire.parallel.launch import WorkerContext, run_worker
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.ring import RingMessage
from quire.worker.cpu_executor import CpuStepExecutor
from quire.worker.expert_moves import ExpertMover
from quire.worker.parallel_build import RankConfig, build_rank, check_rank_memory, make_mover, num_threads_of, page_part
from quire.worker.parallel_launch import own_fingerprint
from quire.worker.parallel_messages import (
    Call,
    Changes,
    change_model,
    decode_changes,
    decode_one_token,
    decode_page_moves,
    decode_step,
)
from quire.worker.step_executor import Moves


def main(context: WorkerContext) -> None:
    """Load the shard, then follow the leader until it closes the group."""
    config = RankConfig.from_json(context.config)
    if context.num_on_host is None:
        bind_rank_to_numa_node(context.rank, config.num_threads)
    torch.set_num_threads(num_threads_of(config, context.rank, context.num_on_host, context.own))
    rows_file = os.memfd_create("quire-rows") if context.exchange is not None else context.open_descriptor(config.rows_file)
    config = replace(config, rows_file=rows_file)
    if config.slots_file >= 0 and context.exchange is None:
        config = replace(config, slots_file=context.open_descriptor(config.slots_file))
    folder = Path(config.folder)
    if context.exchange is not None and isinstance(context.own, EngineConfig):
        folder = resolve_model(context.own.model, context.own.revision)  # the checkpoint of this host
    if config.checks_first:
        _check_alike(context, config, folder)
    context.startup.stage("loading weights")
    check_rank_memory(config.needed_bytes, context.rank)
    decoder, memory = build_rank(config, folder, context.rank, context.barrier, context.exchange, context.subgroups)
    mover = make_mover(config, folder, decoder, context.communicator) if config.expert_move_bytes else None
    executor = CpuStepExecutor(decoder, memory, config.max_num_seqs)
    executor.take_pages(())
    part = page_part(config, folder, context.rank, memory.kv, context.exchange)
    executor.open_host_tier(config.num_host_pages, part=part)
    if not config.checks_first:
        _check_alike(context, config, folder)
    context.startup.ready({"packed_weight_bytes": decoder.weight_bytes})
    try:
        while True:
            message = context.ring.receive()
            if message is not None and not _follow(executor, Call(int(message.header[0])), context):
                make_call(executor, decoder, message, mover)
    finally:
        executor.close()


def _check_alike(context: WorkerContext, config: RankConfig, folder: Path) -> None:
    context.startup.stage("comparing ranks")
    check_fingerprints(context.communicator, own_fingerprint(context.own, folder, config.options))


def _follow(executor: CpuStepExecutor, call: Call, context: WorkerContext) -> bool:
    """Make a call that the leader waits for, and tell it when that is done; return whether it was such a call."""
    if call not in (Call.SLEEP, Call.WAKE_UP, Call.WAIT):
        return False
    if call is Call.SLEEP:
        executor.sleep()
    elif call is Call.WAKE_UP:
        executor.wake_up()
    context.communicator.barrier()
    return True


def make_call(
    executor: CpuStepExecutor, decoder: NativeDecoder, message: RingMessage, mover: ExpertMover | None = None
) -> None:
    """Make the call that the leader has made."""
    call = Call(int(message.header[0]))
    with executor.step_scope():
        if call is Call.CHANGES:
            _make_changes(executor, decode_changes(message))
        elif call is Call.STEP:
            step = decode_step(message)
            if step.changes is not None:
                _make_changes(executor, step.changes)
            with nullcontext() if mover is None else mover.during_step():
                executor.start_step(step.tokens, step.wants_best, step.needs_logits, step.hidden_rows, step.keeps_all, ())
        elif call is Call.MOVE_TOKENS:
            sources, targets = (array.tolist() for array in message.arrays)
            executor.move_tokens(Moves(sources, targets, []))
        elif call is Call.MOVE_PAGES:
            executor.move_pages(0, *decode_page_moves(message))
        elif call is Call.LOGITS:
            decoder.logits_of(message.arrays[0].tolist())
        elif call is Call.ONE_TOKEN:
            OneTokenSteps.run_call(decoder, executor.target.kv, decode_one_token(message))
        else:
            change_model(message, decoder.adapters, mover)


def _make_changes(executor: CpuStepExecutor, changes: Changes) -> None:
    for batch_slot, index, block_ids in changes.entries:
        executor.block_tables[batch_slot, index : index + len(block_ids)] = block_ids
    executor.begin_step(changes.entries, changes.block_copies)


if __name__ == "__main__":
    sys.exit(run_worker(main))
