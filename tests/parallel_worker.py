"""A worker for tests of the launcher: `config["do"]` says what it does."""

import os
import signal
import time

import torch

from quire.base.errors import ModelFormatError
from quire.parallel.launch import WorkerContext, run_worker


def main(context: WorkerContext) -> None:
    do, victim = context.config["do"], context.config.get("victim", 1)
    context.startup.stage("loading weights")
    if do == "gloo":
        exchange_over_gloo(context)
    if context.rank == victim and do == "refuse":
        raise ModelFormatError("model.safetensors is damaged")
    if context.rank == victim and do == "raise":
        raise KeyError("a bug")
    if context.rank == victim and do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == victim and do == "hang":
        time.sleep(60)
    context.startup.stage("agreeing")
    context.startup.ready({"rank": context.rank, "num_kv_blocks": 100 + context.rank})
    while True:
        message = context.ring.receive()
        if message.header[0] == 0:
            return
        if message.header[0] == 2:
            raise ValueError(f"step {message.header[1]} failed")
        x = torch.from_numpy(message.arrays[0].astype("float32") * (context.rank + 1))
        context.communicator.all_reduce(x)


def exchange_over_gloo(context: WorkerContext) -> None:
    from quire.parallel.torch_communicator import TorchCommunicator

    communicator = TorchCommunicator.gloo(context.connect_store(), context.rank, context.size, interface="lo")
    x = torch.full((3,), float(context.rank))
    communicator.all_reduce(x)
    assert x.tolist() == [sum(range(context.size))] * 3
    communicator.close()


if __name__ == "__main__":
    run_worker(main)
