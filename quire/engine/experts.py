"""Planning where experts are, for packages that may not import below the engine."""

from quire.worker.expert_planning import LayerBalance, improve_experts, place_experts

__all__ = ["LayerBalance", "improve_experts", "place_experts"]
