"""Where LoRA adapters are supported, and the adapters that a worker has loaded."""

from __future__ import annotations

from typing import Protocol

from quire.base.errors import ConfigError, InvariantError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.contracts.lora import AdapterReport
from quire.contracts.memory import ModelReport, format_bytes
from quire.contracts.model_spec import ModelSpec
from quire.model.build import Model
from quire.model.lora.adapter import Adapter, AdapterReader
from quire.model.lora.experts import is_expert
from quire.model.lora.numbers import AdapterHolder
from quire.model.transformers_backend.decoder import TransformersDecoder


class AdapterStore(Protocol):
    """The adapters of a worker. The tokens of a sequence use the adapter whose key is Request.adapter_key."""

    def load(self, path: str) -> AdapterReport:
        """Load the adapter of a folder, unless it is loaded. Raises ModelFormatError or UnsupportedError."""
        ...

    def unload(self, key: str) -> None:
        """Release an adapter that no sequence uses any more."""
        ...


class DecoderAdapters:
    """Implements AdapterStore for a decoder of this process.

    Adapters of experts, which may be much larger than the memory plan counts, take no more than it counts for all adapters.
    """

    def __init__(self, config: EngineConfig, report: ModelReport, holder: AdapterHolder) -> None:
        self._reader = AdapterReader(report.folder, report.spec, config.max_lora_rank)
        self._holder = holder
        self._max_loras, self._num_ranks = config.max_loras, config.tensor_parallel_size
        self._most_bytes = config.max_loras * self._reader.num_bytes(config.max_lora_rank)
        self._num_bytes: dict[str, int] = {}

    def load(self, path: str) -> AdapterReport:
        """See AdapterStore."""
        adapter = self._reader.read(path)
        if adapter.key not in self._num_bytes:
            self._check_room(adapter)
            self._holder.load(adapter)
            self._num_bytes[adapter.key] = adapter.num_bytes
        return AdapterReport(adapter.key, adapter.rank, len(adapter.pairs), adapter.num_bytes)

    def _check_room(self, adapter: Adapter) -> None:
        expert_bytes = sum(pair.num_bytes for name, pair in adapter.pairs.items() if is_expert(name))
        loaded = sum(self._num_bytes.values())
        # With expert parallelism every rank has those of all experts, which may move between ranks.
        if expert_bytes > 0 and loaded + adapter.num_bytes + (self._num_ranks - 1) * expert_bytes > self._most_bytes:
            raise UnsupportedError(
                f"the adapter of {format_bytes(adapter.num_bytes)} ({format_bytes(expert_bytes)} of it for experts, on each of "
                f"{self._num_ranks} ranks) has no room: the memory plan has {format_bytes(self._most_bytes)} for all adapters, "
                f"of which {format_bytes(loaded)} are taken; raise max_loras, which is {self._max_loras} (--max-loras), or "
                "max_lora_rank (--max-lora-rank)"
            )

    def unload(self, key: str) -> None:
        """See AdapterStore."""
        self._holder.unload(key)
        self._num_bytes.pop(key, None)


def adapters_of(
    config: EngineConfig, report: ModelReport, model: Model, holder: AdapterHolder | None = None
) -> DecoderAdapters:
    """Return the adapters of a decoder that was built with `has_adapters`; holder: where not only the decoder loads them."""
    if holder is None and not isinstance(model, TransformersDecoder):
        holder = model.adapters
    if holder is None:
        raise InvariantError("the decoder takes no adapters")
    return DecoderAdapters(config, report, holder)


def check_lora(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """Raise UnsupportedError for a model whose layers cannot be adapted, and ConfigError for GPUs that share a model.

    device  ModelReport.device
    """
    if config.tensor_parallel_size > 1 and device != "cpu":
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but with LoRA adapters (enable_lora) only ranks on CPUs "
            "share a model: change it, or merge the adapter into the weights and leave enable_lora out"
        )
    if spec.has_recurrent_state:
        raise UnsupportedError(
            f"enable_lora: LoRA adapters of models with a recurrent state ({spec.model_type!r}) are not supported; merge the "
            "adapter into the weights, or take a model with attention in all layers"
        )
