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
        self._divides_experts = config.enable_expert_parallel
        self._most_bytes = config.max_loras * self._reader.num_bytes(config.max_lora_rank, self._num_ranks)
        self._num_bytes: dict[str, int] = {}

    def load(self, path: str) -> AdapterReport:
        """See AdapterStore."""
        adapter = self._reader.read(path)
        if adapter.key not in self._num_bytes:
            num_bytes = self._bytes_on_ranks(adapter)
            self._check_room(adapter, num_bytes)
            self._holder.load(adapter)
            self._num_bytes[adapter.key] = num_bytes
        return AdapterReport(adapter.key, adapter.rank, len(adapter.pairs), adapter.num_bytes)

    def unload(self, key: str) -> None:
        """See AdapterStore."""
        self._holder.unload(key)
        self._num_bytes.pop(key, None)

    def _bytes_on_ranks(self, adapter: Adapter) -> int:
        """Return what an adapter takes on all ranks, which have the whole first matrices. With expert parallelism each has the
        pairs of all experts, which may move between ranks."""
        total = 0
        for name, pair in adapter.pairs.items():
            copies = self._num_ranks if self._divides_experts and is_expert(name) else 1
            total += self._num_ranks * pair.a.nbytes + copies * pair.b.nbytes
        return total

    def _check_room(self, adapter: Adapter, num_bytes: int) -> None:
        loaded = sum(self._num_bytes.values())
        if any(is_expert(name) for name in adapter.pairs) and loaded + num_bytes > self._most_bytes:
            raise UnsupportedError(
                f"the adapter, which is for experts, takes {format_bytes(num_bytes)}, but of the "
                f"{format_bytes(self._most_bytes)} that the memory plan has for adapters {format_bytes(loaded)} are taken: "
                f"raise max_loras, which is {self._max_loras} (--max-loras), or max_lora_rank (--max-lora-rank)"
            )


def adapters_of(
    config: EngineConfig, report: ModelReport, model: Model | None, holder: AdapterHolder | None = None
) -> DecoderAdapters:
    """Return the adapters of a decoder that was built with `has_adapters`; holder: where not only the decoder loads them, or
    there is none here."""
    if holder is None and model is not None and not isinstance(model, TransformersDecoder):
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
