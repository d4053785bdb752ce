"""Experts that move to a GPU while its engine runs: read from the checkpoint in a thread, next to the steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from quire.base.errors import InvariantError
from quire.contracts.config import EngineConfig
from quire.contracts.memory import ModelReport
from quire.model.checkpoint import open_parameters
from quire.model.device_decoder import DeviceDecoder
from quire.model.device_shards import DeviceShard
from quire.model.device_weights import DeviceWeights, load_on_device
from quire.quant.policy import DEVICE_POLICIES, parameter_quantizer
from quire.worker.device.gpu_group import GpuGroup
from quire.worker.expert_moves import ExpertMover


class DeviceExpertLoader:
    """Reads single experts of a model that runs on a device; used by one thread at a time."""

    def __init__(self, config: EngineConfig, report: ModelReport, decoder: DeviceDecoder) -> None:
        if decoder.ranks is None:
            raise InvariantError("experts move between ranks, and there is one")
        self._spec, self._decoder, self._shard = report.spec, decoder, decoder.ranks.shard
        self._parameters = open_parameters(report.folder, report.spec)
        policy = None if config.quantization is None else DEVICE_POLICIES[config.quantization]
        self._quantize = (
            None if policy is None else parameter_quantizer(self._parameters, report.spec, policy, keeps_float8=True)
        )
        if decoder.stage is not None:
            own = decoder.stage.stage
            self._quantize = None if self._quantize is None else replace(self._quantize, first_layer=own.start)
            self._parameters, self._spec = decoder.stage.take_parameters(self._parameters), own.spec(self._spec)
        self._stream = torch.cuda.Stream(decoder.device) if decoder.device.type == "cuda" else None

    def load(self, layer: int, expert: int) -> DeviceWeights:
        """Return the weights of an expert on the device, and all of them there; layer: of the decoder. Raises
        UnsupportedError."""
        prefix = f"layers.{layer}.experts."
        parameters = {name: parameter for name, parameter in self._parameters.items() if name.startswith(prefix)}
        with self._decoder.on_device(), self._on_stream():
            weights = load_on_device(
                parameters, self._spec, self._decoder.device, self._quantize, shard=_expert_shard(self._shard, layer, expert)
            )
            if self._stream is not None:
                self._stream.synchronize()
        self._decoder.check_expert(layer, weights)
        return weights

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _expert_shard(shard: DeviceShard, layer: int, expert: int) -> DeviceShard:
    """Return the shard of a rank that holds one expert of a layer only."""
    own = shard.own
    layers = list(own.layers)
    experts = layers[layer].experts
    assert experts is not None
    layers[layer] = replace(layers[layer], experts=replace(experts, experts=(expert,)))
    ranks = list(shard.ranks)
    ranks[shard.rank] = replace(own, layers=tuple(layers))
    return replace(shard, ranks=tuple(ranks))


def device_mover(config: EngineConfig, report: ModelReport, decoder: DeviceDecoder, group: GpuGroup) -> ExpertMover:
    """Return what moves experts to this rank and from it. Every rank calls this."""
    loader, place = DeviceExpertLoader(config, report, decoder), group.places[group.rank]
    layers = range(place.stage.start, place.stage.stop)
    return ExpertMover(decoder, loader.load, group.host, group.placements or {}, rank=place.tensor_rank, layers=layers)
