"""Tensor-parallel ranks of a GPU model as threads of this process, over gloo; kernels run in Triton's interpreter."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from quire.contracts.kv_spec import KvSpec
from quire.kernels.triton.launching import Launch
from quire.kv.device_pool import DeviceKvPool
from quire.model.device_context import ContextRanks
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_ranks import DeviceRanks
from quire.model.device_shards import DeviceShard
from quire.parallel.communicator import CountingCommunicator
from quire.parallel.torch_communicator import TorchCommunicator
from tests.ranks import run_threads


def one_launch_at_a_time(patch):
    """Have threads take turns to launch: the interpreter has one state for the whole process."""
    lock, run = threading.RLock(), Launch.run

    def run_alone(launch):
        with lock:
            run(launch)

    patch.setattr(Launch, "run", run_alone)


def gloo_communicators(size):
    """A group of gloo in one process: each rank connects in a thread of its own."""
    store = torch.distributed.HashStore()

    def connect(rank):
        return TorchCommunicator.gloo(store, rank, size, timedelta(seconds=60), interface="lo")

    return run_threads(size, connect)


class DeviceRankThreads:
    """The ranks of a model.

    parameters  returns the model's parameters anew: each rank empties its own
    placements  of whole experts; hosts: of the ranks
    context_size  all ranks, where they share the tokens of sequences
    """

    def __init__(
        self,
        spec,
        parameters,
        shares,
        max_model_len,
        device,
        is_in_order=False,
        policy=None,
        placements=None,
        hosts=None,
        context_size=1,
    ):
        self.size = len(shares)
        self._gloo = gloo_communicators(self.size)
        self.communicators = [CountingCommunicator(each) for each in self._gloo]

        def build(rank):
            shard = DeviceShard.of(spec, rank, shares, is_in_order, placements, context_size)
            context = ContextRanks(self.communicators[rank], rank) if context_size > 1 else None
            ranks = DeviceRanks(self.communicators[rank], shard, hosts, context)
            return DeviceDecoder(spec, parameters(), max_model_len, device, policy, is_in_order, ranks)

        self.decoders = run_threads(self.size, build)

    def pools(self, block_size, dtype, num_blocks, device):
        """Return a cache for each rank."""
        specs = [each.ranks.shard.cached_spec for each in self.decoders]
        return [DeviceKvPool(KvSpec.on_device(spec, block_size, dtype), num_blocks, device) for spec in specs]

    def call(self, act):
        """Return what act(decoder, rank) returns on each rank."""
        return run_threads(self.size, lambda rank: act(self.decoders[rank], rank), timeout_s=300)

    def take_counts(self):
        """Return how many calls of each collective rank 0 has made since the last time."""
        found = {name: count.num_calls for name, count in self.communicators[0].counts.items()}
        self.communicators[0].counts.clear()
        return found

    def close(self):
        """End the threads of gloo."""
        for communicator in self._gloo:
            communicator.close()
