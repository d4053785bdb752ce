"""Expert parallelism: which rank holds which experts of a mixture model, and how many tokens they get."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.logging import get_logger
from quire.contracts.config import EngineConfig
from quire.contracts.expert_stats import ExpertStats
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec, MoeSpec
from quire.model.native_model import native_refusal
from quire.parallel.expert_balance import place
from quire.parallel.expert_files import read_loads, read_placements, write_loads, write_placements
from quire.parallel.expert_placement import ExpertPlacement, linear_placement, slot_counts
from quire.worker.memory import cpu_block_size

logger = get_logger(__name__)

_LOSSY = ("expert_capacity_factor", "expert_bias_rate", "expert_min_share")
_EXPERT_OPTIONS = ("enable_expert_parallel", "save_expert_load", *_LOSSY)

Placements = dict[int, ExpertPlacement]
"""Of each layer that has experts, by its index in the model."""


def count_experts(spec: ModelSpec) -> dict[int, int]:
    """Return the number of experts of each layer that has any, by its index."""
    return {index: layer.mlp.num_experts for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoeSpec)}


def _mixtures(spec: ModelSpec) -> list[MoeSpec]:
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]


def find_placements(config: EngineConfig, spec: ModelSpec) -> Placements | None:
    """Return where the experts of a model are; None without enable_expert_parallel.

    Raises ConfigError for models without experts, more ranks than experts, and files that do not fit the model.
    """
    if not config.enable_expert_parallel:
        return None
    num_experts, shares = count_experts(spec), config.parallel.shares
    if not num_experts:
        raise ConfigError(
            f"enable_expert_parallel is for mixture models, but the model ({spec.model_type}) has no experts: leave it out; "
            "tensor_parallel_size does without"
        )
    if config.expert_load is not None:
        counts = {layer: slot_counts(count, config.num_redundant_experts, shares) for layer, count in num_experts.items()}
        tokens = read_loads(config.expert_load, num_experts)
        return {layer: place(tokens[layer], counts[layer], shares) for layer in num_experts}
    if config.expert_placement == "linear":
        return linear_placements(spec, config.num_redundant_experts, shares)
    return read_placements(config.expert_placement, num_experts, len(shares))


def linear_placements(spec: ModelSpec, num_redundant: int, shares: Sequence[float]) -> Placements:
    """Return consecutive experts for each rank, with so many copies in each layer. Raises ConfigError."""
    counts = count_experts(spec)
    return {layer: linear_placement(count, slot_counts(count, num_redundant, shares)) for layer, count in counts.items()}


def placement_lists(placements: Placements | None) -> tuple[list[list[int]], ...] | None:
    """Return placements as JSON: for each layer that has experts, in order, those of each rank."""
    return None if placements is None else tuple([list(own) for own in each.ranks] for each in placements.values())


def placements_of(lists: Sequence[list[list[int]]] | None, spec: ModelSpec) -> Placements | None:
    """Return what placement_lists was called on."""
    if lists is None:
        return None
    layers = zip(count_experts(spec).items(), lists, strict=True)
    return {layer: ExpertPlacement(count, tuple(map(tuple, ranks))) for (layer, count), ranks in layers}


def placements_in(placements: Placements | None, first: int, last: int) -> Placements | None:
    """Return where the experts of layers [first, last) are, by their indices among these."""
    if placements is None:
        return None
    return {layer - first: placement for layer, placement in placements.items() if first <= layer < last}


def check_experts(config: EngineConfig, report: ModelReport) -> None:
    """Raise ConfigError where the options of experts do not fit the model or the device."""
    names = [name for name in _EXPERT_OPTIONS if getattr(config, name) not in (None, False)]
    if not names:
        return
    name = names[0]
    refusal = native_refusal(report.spec, cpu_block_size(config)) if report.device == "cpu" else None
    if refusal is not None:
        raise ConfigError(f"{name} needs the native kernels, which do not run {refusal}: leave it out")
    if not count_experts(report.spec):
        raise ConfigError(
            f"{name} is for mixture models, but the model ({report.spec.model_type}) has no experts: leave it out"
        )
    find_placements(config, report.spec)
    size = config.pipeline_parallel_size
    for name in ("enable_eplb", "save_expert_placement") if size > 1 and report.device == "cpu" else ():
        if getattr(config, name) not in (None, False):
            raise ConfigError(
                f"{name} and pipeline_parallel_size {size}: both together are not supported on CPUs; leave one of them out"
            )
    for name in ("save_expert_load", "save_expert_placement"):
        path = getattr(config, name)
        if path is not None and not os.access(Path(path).expanduser().parent, os.W_OK):
            raise ConfigError(f"{name} is {path!r}, but its folder does not exist or cannot be written to")
    if config.lossy_routing and any(mlp.scoring == "sparse" for mlp in _mixtures(report.spec)):
        raise ConfigError(
            f"{names[-1]} does not fit the model ({report.spec.model_type}), which chooses experts by a threshold: leave it out"
        )


def warn_lossy(config: EngineConfig) -> None:
    """Log which options change outputs, and how to measure what they cost."""
    for name in _LOSSY:
        value = getattr(config, name)
        if value is not None:
            logger.warning(
                "%s %g changes outputs%s. Its cost on a text: quire bench perplexity --model %s --text FILE --against %s=%g",
                name,
                value,
                "" if name == "expert_min_share" else ", and a request's output depends on the other requests of its steps",
                config.model,
                name,
                value,
            )


def save_expert_load(path: str, stats: Sequence[ExpertStats]) -> None:
    """Write the tokens of each expert to a file; an engine that ends logs where it cannot."""
    try:
        write_loads(path, {each.layer: each.tokens for each in stats})
    except ConfigError as error:
        logger.error("the load of the experts is lost: %s", error)


def add_pairs(path: str, pairs: Mapping[int, Sequence[Sequence[int]]]) -> None:
    """Add the tokens that chose two experts to a file of save_expert_load; a failure is logged."""
    try:
        write_loads(path, read_loads(path), pairs)
    except ConfigError as error:
        logger.error("the pairs of experts are lost: %s", error)


def save_placements(path: str, loads: PlacedLoads) -> None:
    """Write where the experts are to a file; a failure is logged."""
    try:
        write_placements(path, loads.placements)
    except ConfigError as error:
        logger.error("the placement of the experts is not saved: %s", error)


def copied_weight_bytes(config: EngineConfig, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], num_bytes: int) -> int:
    """Return the bytes of the copies of experts, where all weights of the model take num_bytes."""
    placements = find_placements(config, spec) if count_experts(spec) else None
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    return num_bytes * count_copied_parameters(placements or {}, shapes) // num_parameters


def expert_parameters(shapes: Mapping[str, tuple[int, ...]], layer: int) -> int:
    """Return the parameters of one expert of a layer; 0 where it has none."""
    return sum(math.prod(shape[1:]) for name, shape in shapes.items() if name.startswith(f"layers.{layer}.experts."))


def count_copied_parameters(placements: Mapping[int, ExpertPlacement], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the parameters of the copies of experts: those that the ranks together hold in addition to the model's."""
    total = 0
    for layer, placement in placements.items():
        total += (placement.num_slots - placement.num_experts) * expert_parameters(shapes, layer)
    return total


@dataclass(slots=True)
class _LayerLoad:
    """Of a layer: the tokens of experts and ranks when its placement last changed, and what has been done to it."""

    tokens: list[int]
    rank_tokens: list[float]
    before: float = 0.0
    after: float = 0.0
    num_moved: int = 0
    num_failed: int = 0


class PlacedLoads:
    """Statistics of experts that are placed on ranks, over changes of the placements; shares: what each rank gets."""

    def __init__(self, placements: Mapping[int, ExpertPlacement], shares: Sequence[float]) -> None:
        self.shares = shares
        self.placements = dict(placements)
        self._layers = {
            layer: _LayerLoad([0] * placement.num_experts, [0.0] * len(placement.ranks))
            for layer, placement in placements.items()
        }

    def note_plan(self, layer: int, before: float, after: float) -> None:
        """Take max/mean that a rebalancing has found in its window, and that it has planned."""
        self._layers[layer].before, self._layers[layer].after = before, after

    def note_failure(self, layer: int, num_moves: int) -> None:
        """Count slots whose new expert could not be loaded."""
        self._layers[layer].num_failed += num_moves

    def switch(self, layer: int, placement: ExpertPlacement, tokens: Sequence[int], num_moves: int) -> None:
        """Take a new placement; tokens: of each expert so far."""
        load, old = self._layers[layer], self.placements[layer]
        recent = _difference(tokens, load.tokens)
        load.rank_tokens = [a + b for a, b in zip(load.rank_tokens, old.rank_loads(recent).tolist(), strict=True)]
        load.tokens = list(tokens)
        load.num_moved += num_moves
        self.placements[layer] = placement

    def stats(self, layer: int, tokens: Sequence[int]) -> ExpertStats:
        """Return the statistics of a layer; tokens: of each expert so far."""
        load, placement = self._layers[layer], self.placements[layer]
        recent = _difference(tokens, load.tokens)
        ranks = [a + b for a, b in zip(load.rank_tokens, placement.rank_loads(recent).tolist(), strict=True)]
        return ExpertStats(
            layer=layer,
            tokens=list(tokens),
            rank_tokens=ranks,
            imbalance=placement.imbalance(recent, self.shares),
            imbalance_before=load.before,
            imbalance_after=load.after,
            num_moved=load.num_moved,
            num_failed_moves=load.num_failed,
        )


def _difference(tokens: Sequence[int], before: Sequence[int]) -> list[int]:
    return [now - then for now, then in zip(tokens, before, strict=True)]


def expert_stats(tokens: Sequence[Sequence[int]], placed: PlacedLoads | None = None) -> list[ExpertStats]:
    """Return the statistics of the layers that have experts.

    tokens  of each expert of each layer; of layers without experts empty
    placed  None where no experts are placed on ranks
    """
    if placed is not None:
        return [placed.stats(layer, counts) for layer, counts in enumerate(tokens) if counts]
    return [ExpertStats(layer=layer, tokens=list(counts), rank_tokens=[]) for layer, counts in enumerate(tokens) if counts]


def with_routing_counts(stats: Sequence[ExpertStats], counts: Sequence[tuple[int, int, int, float]]) -> list[ExpertStats]:
    """Return statistics with what lossy routing has done; counts: of each layer, as Plan.routing_counts returns them."""
    found: list[ExpertStats] = []
    for each in stats:
        overflowed, dropped, weak, use = counts[each.layer]
        found.append(replace(each, num_overflowed=overflowed, num_dropped=dropped, num_weak=weak, capacity_use=use))
    return found
