"""Inspection of a model without its weights, for packages that may not import below the engine."""

from quire.worker.inspect import check_weights, inspect_model, stage_memories, thread_places, weight_bytes_by_precision
from quire.worker.memory import skipped_layers
from quire.worker.parallel_build import RankMemory, rank_memories
from quire.worker.pipeline_plan import StageMemory

__all__ = [
    "RankMemory",
    "StageMemory",
    "check_weights",
    "inspect_model",
    "rank_memories",
    "skipped_layers",
    "stage_memories",
    "thread_places",
    "weight_bytes_by_precision",
]
