"""What every stage of a pipeline has to know to build its part, and how it does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.contracts.kv_spec import KvDtype, KvSpec
from quire.contracts.memory import MemoryPlan
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.pipeline_stages import PipelineStage
from quire.model.stage_decoder import StageDecoder
from quire.parallel.barrier import native_extension
from quire.quant.policy import POLICIES, parameter_quantizer
from quire.worker.pipeline_memory import PipelineSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Decided by the leader, and sent to the stages as JSON.

    layers           the number of layers of each stage
    num_threads      of each stage
    num_batch_slots  rows of the block tables
    allow_missing_head as in EngineConfig
    """

    folder: str
    dtype: str
    quantization: str | None
    allow_missing_head: bool
    max_model_len: int
    num_batch_slots: int
    block_size: int
    kv_dtype: KvDtype
    num_kv_blocks: int
    layers: tuple[int, ...]
    num_threads: tuple[int, ...]
    sizes: PipelineSizes

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """All stages, in order."""
        return PipelineStage.all_of(self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StageConfig:
        """Return what to_json was called on."""
        lists = {name: tuple(fields[name]) for name in ("layers", "num_threads")}
        return cls(**{**fields, **lists, "sizes": PipelineSizes(**fields["sizes"])})


def build_stage(config: StageConfig, index: int) -> tuple[StageDecoder, MemoryPlan]:
    """Load the layers of a stage; return what runs them, and the plan of its KV cache. Nothing of other stages is opened.

    Raises ModelFormatError, UnsupportedError or ConfigError.
    """
    folder, stage = Path(config.folder), config.stages[index]
    spec = read_model_spec(folder, config.dtype)
    if config.allow_missing_head:
        spec = tie_missing_head(folder, spec)
    parameters = open_parameters(folder, spec)
    policy = None if config.quantization is None else POLICIES[config.quantization]
    quantize = None if policy is None else parameter_quantizer(parameters, spec, policy).narrowed
    decoder = StageDecoder(native_extension(), stage, spec, parameters, config.max_model_len, quantize)
    kv = KvSpec.of(stage.spec(spec), config.block_size, config.kv_dtype)
    return decoder, MemoryPlan(0, decoder.weight_bytes, 0, kv, config.num_kv_blocks, config.max_model_len)
