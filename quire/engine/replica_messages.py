"""The messages between ReplicaEngine and its processes.

They are pickled, because both ends belong to one program and user and the socket pair is private: requests as they are
made, outputs as LLM returns them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from quire.base.errors import QuireError, RequestError
from quire.contracts.config import EngineConfig
from quire.contracts.lora import LoRARequest
from quire.contracts.memory import ModelReport
from quire.contracts.outputs import EmbeddingRequestOutput, RequestOutput
from quire.contracts.request import Request
from quire.contracts.scheduler_config import SchedulerConfig
from quire.contracts.sleep import SleepLevel


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


@dataclass(frozen=True, slots=True)
class AdapterCommand:
    """Load, unload or list LoRA adapters. Each is answered by an AdapterAnswer.

    lora         to load
    lora_int_id  of the one to unload
    """

    action: Literal["add", "remove", "list"]
    lora: LoRARequest | None = None
    lora_int_id: int = 0


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """The result of an AdapterCommand.

    is_changed  the adapter was loaded, or unloaded
    loaded      numbers of the adapters in memory afterwards
    error       why it was not loaded
    """

    is_changed: bool
    loaded: frozenset[int]
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class SleepCommand:
    """Sleep at a level, or wake up (None); the answer is a SleepAnswer. No request is unfinished."""

    level: SleepLevel | None


@dataclass(frozen=True, slots=True)
class SleepAnswer:
    """The replica has made a SleepCommand; error: it could not."""

    error: QuireError | None


Output = RequestOutput | EmbeddingRequestOutput | AdapterAnswer | SleepAnswer | tuple[str, RequestError]
"""The last output of a request; or its id and the reason of its refusal; or the answer to a command."""

Command = Request | AdapterCommand | SleepCommand | str
"""A request, a command about adapters, sleeping and waking up, or the id of a request to abort."""


def send_start(connection: Connection, config: EngineConfig) -> None:
    """Send a process its configuration and log level."""
    connection.send((config, logging.getLogger("quire").getEffectiveLevel()))
