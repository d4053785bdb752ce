"""The process of a rank, or a stage, on a GPU: loads its part of the model, and launches what the leader launches.

Run by the leader as `python -m quire.worker.device.gpu_worker`, see quire.parallel.launch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire.contracts.config import EngineConfig
from quire.model.lora.device_adapters import DeviceAdapters
from quire.model.resolve import resolve_model
from quire.parallel.launch import WorkerContext, run_worker
from quire.parallel.rendezvous import check_fingerprints
from quire.parallel.ring import RingMessage
from quire.worker.device.build import build_rank
from quire.worker.device.gpu_executor import GpuStepExecutor
from quire.worker.device.gpu_group import GpuGroup, RankConfig
from quire.worker.device.staged_call import decode_staged
from quire.worker.expert_moves import ExpertMover
from quire.worker.parallel_launch import own_fingerprint
from quire.worker.parallel_messages import Call, change_model, decode_page_moves


def main(context: WorkerContext) -> None:
    """Load the part, then follow the leader until it closes the group."""
    torch.set_num_threads(max(1, torch.get_num_threads() // (context.num_on_host or context.size)))  # that load weights
    told = RankConfig.from_json(context.config)
    if context.exchange is not None and isinstance(context.own, EngineConfig):
        folder = resolve_model(context.own.model, context.own.revision)  # of this host
        told = replace(told, config=replace(told.config, model=str(folder)))
    elif told.slots_file >= 0:
        told = replace(told, slots_file=context.open_descriptor(told.slots_file))
    config = told.config
    if told.options:
        context.startup.stage("comparing ranks")
        check_fingerprints(context.communicator, own_fingerprint(context.own, Path(config.model), told.options))
    device = told.device(context.rank if context.local_rank is None else context.local_rank)
    context.startup.stage("inspecting the model")
    report = told.report(context.rank, device)
    context.startup.stage("connecting")
    group = GpuGroup.connect(context, context.connect_store(), device, told)
    context.startup.stage("loading weights")
    built = build_rank(config, device, report, told.sizes, group)
    context.startup.ready({"num_kv_blocks": built.plan.num_kv_blocks})
    follower = Follower(built.executor, group, built.mover, built.adapters)
    while True:
        message = context.ring.receive()
        if message is None:
            continue
        if follower.follow_waiting(Call(int(message.header[0]))):
            context.communicator.barrier()  # the leader waits in it
        else:
            follower.follow(message)


class Follower:
    """Makes the calls of the leader's executor on this rank's. It reads nothing back."""

    def __init__(
        self,
        executor: GpuStepExecutor,
        group: GpuGroup,
        mover: ExpertMover | None = None,
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self._executor, self._group, self._mover, self._adapters = executor, group, mover, adapters
        self._hidden: dict[int, Tensor] = {}  # of the last steps that kept them, by Launched.place
        self._num_kept = 0
        self._num_moved = 0

    def follow_waiting(self, call: Call) -> bool:
        """Make a call of the leader that it waits for: to sleep, to wake up, or to end all copies of pages; return whether it
        was such a call."""
        if call is Call.SLEEP:
            self._hidden.clear()
            self._executor.sleep()
        elif call is Call.WAKE_UP:
            self._executor.wake_up()
        elif call is Call.SETTLE_PAGES:
            with self._executor.step_scope():
                self._note_moved(waits=True)
        else:
            return False
        return True

    def follow(self, message: RingMessage) -> None:
        """Make the call of a message; it returns before the device is done."""
        call = Call(int(message.header[0]))
        self._note_moved(waits=False)
        with self._executor.step_scope():
            if call is Call.STAGED:
                staged_call, staged = decode_staged(message)
                self._executor.fill_staging(staged)
                _, hidden = self._executor.run_staged(staged_call)
                if staged_call.keeps_hidden and hidden is not None:
                    self._hidden[self._num_kept % self._executor.max_in_flight] = self._executor.kept(hidden)
                    self._num_kept += 1
            elif call is Call.LOGITS:
                if self._executor.samples:
                    first, last, place = message.header[1:4].tolist()
                    numbers = next((array.copy().view(np.int32) for array in message.arrays), None)
                    self._executor.logits_of(self._hidden[place][first:last], numbers)
            elif call is Call.MOVE_PAGES:
                self._executor.move_pages(0, *decode_page_moves(message))
            elif call is Call.COUNT_EXPERTS:
                self._group.gather_counts(self._executor.own_expert_counts())
            elif call is Call.USE_BLOCKS:
                self._executor.use_blocks(message.arrays[0].tolist())
            else:
                change_model(message, self._adapters, self._mover)

    def _note_moved(self, waits: bool) -> None:
        """Tell the leader which page moves have ended; waits: all, when they have."""
        num_ended = len(self._executor.take_moved(waits))
        if num_ended and self._group.moves is not None:
            self._num_moved += num_ended
            self._group.moves.set(self._group.rank, self._num_moved)


if __name__ == "__main__":
    sys.exit(run_worker(main))
