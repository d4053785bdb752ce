"""What crosses between ReplicaEngine and its processes.

Both ends are of one user and one program, over a socket pair that nobody else can open, so it is pickled: requests as they are
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
    """The first message of a replica: what it has loaded."""

    report: ModelReport
    limits: SchedulerConfig


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The first message of a replica that could not be loaded; error: None for one that is a bug."""

    error: QuireError | None
    message: str


Output = RequestOutput | EmbeddingRequestOutput | tuple[str, RequestError]
"""The last output of a request; or its id, and why it was refused."""

Command = Request | str
"""A request, or the id of one to be aborted."""


def send_start(connection: Connection, config: EngineConfig) -> None:
    """Tell a process what to run, and how much to log."""
    connection.send((config, logging.getLogger("quire").getEffectiveLevel()))
