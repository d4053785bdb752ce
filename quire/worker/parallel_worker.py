"""The process of a tensor-parallel worker: loads its shard of the model, and makes the calls that the leader makes.

Run by the leader as `python -m quire.worker.parallel_worker`, see quire.parallel.launch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from quire.base.errors import InvariantError
from quire.model.native_decoder import NativeDecoder
from quire.model.native_steps import OneTokenSteps
from quire.parallel.launch import WorkerContext, run_worker
from quire.parallel.ring import RingMessage
from quire.worker.cpu_executor import CpuStepExecutor
from quire.worker.parallel_build import RankConfig, build_rank
from quire.worker.parallel_messages import Call, decode_changes, decode_one_token, decode_step
from quire.worker.step_executor import Moves


def main(context: WorkerContext) -> None:
    """Load the shard, then follow the leader until it closes the group."""
    config = RankConfig.from_json(context.config)
    torch.set_num_threads(config.num_threads[context.rank])
    context.startup.stage("loading weights")
    decoder, memory = build_rank(config, Path(config.folder), context.rank, context.barrier)
    executor = CpuStepExecutor(decoder, memory, config.max_num_seqs)
    executor.take_pages(())
    context.startup.ready({"packed_weight_bytes": decoder.weight_bytes})
    try:
        while True:
            message = context.ring.receive()
            if message is not None:
                make_call(executor, decoder, message)
    finally:
        executor.close()


def make_call(executor: CpuStepExecutor, decoder: NativeDecoder, message: RingMessage) -> None:
    """Make the call that the leader has made."""
    call = Call(int(message.header[0]))
    with executor.step_scope():
        if call is Call.CHANGES:
            changes = decode_changes(message)
            for batch_slot, index, block_ids in changes.entries:
                executor.block_tables[batch_slot, index : index + len(block_ids)] = block_ids
            executor.begin_step(changes.entries, changes.block_copies)
        elif call is Call.STEP:
            step = decode_step(message)
            executor.start_step(step.tokens, step.wants_best, step.needs_logits, step.hidden_rows, step.keeps_all, ())
        elif call is Call.MOVE_TOKENS:
            sources, targets = (array.tolist() for array in message.arrays)
            executor.move_tokens(Moves(sources, targets, []))
        elif call is Call.LOGITS:
            decoder.logits_of(message.arrays[0].tolist())
        elif call is Call.ONE_TOKEN:
            OneTokenSteps.run_call(decoder, executor.target.kv, decode_one_token(message))
        else:
            raise InvariantError(f"the leader has sent call {call!r}, which no worker knows")


if __name__ == "__main__":
    sys.exit(run_worker(main))
