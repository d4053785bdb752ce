"""What a model is and needs, without its weights, for those who may not reach below the engine."""

from quire.worker.inspect import check_weights, inspect_model

__all__ = ["check_weights", "inspect_model"]
