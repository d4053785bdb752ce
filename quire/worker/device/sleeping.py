"""What a GPU executor releases while it is asleep."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kv.device_pool import DeviceKvPool
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_storages import HostedStorages, ReleasedStorages, storages_of
from quire.model.heads.device_head import DeviceHead
from quire.model.lora.device_adapters import DeviceAdapters
from quire.worker.device.faults import release_unused


class SleepingMemory(NamedTuple):
    """The memory of an executor that sleeps: weights in host memory, and a KV pool without memory."""

    weights: HostedStorages
    pool: ReleasedStorages

    def restore(self) -> None:
        """Take the memory on the device again."""
        self.weights.restore()
        self.pool.restore()


def sleep_on_device(
    decoder: DeviceDecoder | DeviceHead, pool: DeviceKvPool, adapters: DeviceAdapters | None = None
) -> SleepingMemory:
    """Move the weights of a decoder and of its adapters to the host and free its KV pool, when the device is done; no CUDA
    graph may use them."""
    device = decoder.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    pools = ReleasedStorages(storages_of(pool.tensors()))
    weights = [*decoder.weight_tensors(), *([] if adapters is None else adapters.tensors())]
    memory = SleepingMemory(HostedStorages(storages_of(weights)), pools)
    release_unused(device)
    return memory
