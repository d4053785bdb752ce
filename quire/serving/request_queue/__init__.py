"""The path from a handler to the engine and back: admission, the fair queue, and the streams of deltas."""

from quire.serving.request_queue.engine_gateway import ClassSnapshot, EngineGateway, QueueSnapshot
from quire.serving.request_queue.stream import JobStream

__all__ = ["ClassSnapshot", "EngineGateway", "JobStream", "QueueSnapshot"]
