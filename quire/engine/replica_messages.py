"""The messages between ReplicaEngine and its processes.

They are pickled, because both ends belong to one program and user and the socket pair is private: requests as they are
made, outputs as LLM returns them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection

from quire.base.errors import QuireError, RequestError
from quire.contracts.config import EngineConfig, SchedulerConfig
from quire.contracts.memory import ModelReport
from quire.contracts.outputs import EmbeddingRequestOutput, RequestOutput
from quire.contracts.request import Request


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first message of a replica: the properties of its model."""

    report: ModelReport
    limits: SchedulerConfig


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The first message of a replica that could not be loaded; error: None for an internal error."""

    error: QuireError | None
    message: str


Output = RequestOutput | EmbeddingRequestOutput | tuple[str, RequestError]
"""The last output of a request; or its id and the reason of its refusal."""

Command = Request | str
"""A request, or the id of a request to abort."""


def send_start(connection: Connection, config: EngineConfig) -> None:
    """Send a process its configuration and log level."""
    connection.send((config, logging.getLogger("quire").getEffectiveLevel()))
