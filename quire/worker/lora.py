"""Where LoRA adapters are supported, and the adapters that a worker has loaded."""

from __future__ import annotations

from typing import Protocol

from quire.base.errors import ConfigError, InvariantError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.contracts.lora import AdapterReport
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.model.build import Model
from quire.model.lora.adapter import AdapterReader
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
    """Implements AdapterStore for a decoder of this process."""

    def __init__(self, config: EngineConfig, report: ModelReport, holder: AdapterHolder) -> None:
        self._reader = AdapterReader(report.folder, report.spec, config.max_lora_rank)
        self._holder = holder

    def load(self, path: str) -> AdapterReport:
        """See AdapterStore."""
        adapter = self._reader.read(path)
        self._holder.load(adapter)
        return AdapterReport(adapter.key, adapter.rank, len(adapter.pairs), adapter.num_bytes)

    def unload(self, key: str) -> None:
        """See AdapterStore."""
        self._holder.unload(key)


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
