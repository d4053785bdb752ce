"""Where LoRA adapters are supported, and the adapters that a worker has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quire.base.errors import ConfigError, InvariantError, UnsupportedError
from quire.contracts.config import EngineConfig
from quire.contracts.lora import AdapterReport
from quire.contracts.memory import ModelReport, format_bytes
from quire.contracts.model_spec import DTYPE_BYTES, ModelSpec, MoeSpec
from quire.model.build import Model
from quire.model.lora.adapter import Adapter, AdapterReader, adapter_bytes
from quire.model.lora.experts import expert_adapter_bytes, is_expert
from quire.model.lora.numbers import AdapterHolder
from quire.model.parameters import Shape, shapes_with_head
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

    has_fixed_memory  the holder took the memory of all adapters at the start
    """

    def __init__(
        self, config: EngineConfig, report: ModelReport, holder: AdapterHolder, has_fixed_memory: bool = False
    ) -> None:
        spec = report.spec
        self._reader = AdapterReader(report.folder, spec, config.max_lora_rank)
        self._holder = holder
        self._max_loras, self._num_ranks = config.max_loras, config.tensor_parallel_size
        self._divides_experts = config.enable_expert_parallel
        shapes = shapes_with_head(spec, report.parameters)
        self._most_bytes = None if has_fixed_memory else planned_adapter_bytes(config, spec, shapes, self._num_ranks)
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
        loaded, most = sum(self._num_bytes.values()), self._most_bytes
        if most is not None and any(is_expert(name) for name in adapter.pairs) and loaded + num_bytes > most:
            raise UnsupportedError(
                f"the adapter, which is for experts, takes {format_bytes(num_bytes)}, but of the {format_bytes(most)} that the "
                f"memory plan has for adapters {format_bytes(loaded)} are taken: set enable_lora_experts "
                f"(--enable-lora-experts), or raise max_loras, which is {self._max_loras} (--max-loras), or max_lora_rank "
                "(--max-lora-rank)"
            )


def planned_adapter_bytes(config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, Shape], num_ranks: int = 1) -> int:
    """Return what the memory plan counts for adapters: max_loras of max_lora_rank, of experts only with enable_lora_experts.

    shapes     of the parameters of the model, or of a part of it
    num_ranks  see adapter_bytes
    """
    if not config.enable_lora:
        return 0
    rank, width = config.max_lora_rank, DTYPE_BYTES[spec.dtype]
    num_bytes = adapter_bytes(shapes, rank, width, num_ranks)
    if config.enable_lora_experts:
        copies = num_ranks, num_ranks if config.enable_expert_parallel else 1
        num_bytes += expert_adapter_bytes(spec, shapes, rank, width, copies)
    return config.max_loras * num_bytes


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
    """Raise ConfigError for options of adapters that do not fit the model, or the device: ModelReport.device."""
    if config.enable_lora_experts and config.enable_eplb and device != "cpu":
        raise ConfigError(
            "enable_eplb is True, but adapters of experts (enable_lora_experts) do not move between GPUs: leave one of them out"
        )
    if any(layer.attention.shared_kv is not None for layer in spec.layers):  # matrices in blocks, and of entries
        raise ConfigError(f"enable_lora is True, but a {spec.model_type!r} model takes no adapters: leave --enable-lora out")
    if config.enable_lora_experts and not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        raise ConfigError(
            f"enable_lora_experts is True, but the model ({spec.model_type!r}) has no experts: leave --enable-lora-experts out"
        )
