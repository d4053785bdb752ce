"""What a model is and needs, without its weights, for those who may not reach below the engine."""

from quire.worker.inspect import inspect_model

__all__ = ["inspect_model"]
