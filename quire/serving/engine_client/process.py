"""The engine's process: `python -m quire.serving.engine_client.process`, with a Start message on standard input."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from quire.base.errors import ConfigError, ModelFormatError, UnsupportedError
from quire.base.gc_policy import collect_seldom
from quire.base.logging import get_logger, setup_logging
from quire.base.processes import end_with_parent, read_with_length, with_length
from quire.base.threads import prefer_short_spins
from quire.contracts.config import EngineConfig
from quire.contracts.expert_options import counts_experts
from quire.serving.engine_client.engine_info import describe_engine
from quire.serving.engine_client.engine_loop import EngineLoop
from quire.serving.engine_client.kv_events import KvEventPublisher
from quire.serving.engine_client.messages import PROTOCOL_VERSION, Failed, Hello, Ready, Start
from quire.serving.engine_client.port import EnginePort, PeerGoneError
from quire.serving.log_format import setup_log_format

if TYPE_CHECKING:  # it imports torch
    from quire.engine.llm_engine import LLMEngine

logger = get_logger(__name__)

_CONFIG_ERRORS = (ConfigError, ModelFormatError, UnsupportedError)
EXIT_FAILED = 1
EXIT_PEER_GONE = 3


def write_start(start: Start) -> bytes:
    """Return the bytes for the standard input of the process; the pipe must then stay open."""
    return with_length(msgspec.msgpack.encode(start))


def read_start(lifeline: BinaryIO) -> Start:
    """Return the Start message. Raises ConfigError when there is none."""
    try:
        return msgspec.msgpack.decode(read_with_length(lifeline), type=Start)
    except (EOFError, msgspec.MsgspecError) as error:
        raise ConfigError(f"this process is started by `quire serve` alone: no Start message came ({error})") from error


def ignore_signals() -> None:
    """Ignore SIGINT, which a terminal sends to all processes of a group, and SIGTERM: the server handles them and sends
    Stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the server's process ends, even during a step or while stopped. Raises
    PeerGoneError.

    On systems other than Linux the end of the server is noticed between steps, by the end of standard input.
    """
    if not end_with_parent(parent_pid):
        raise PeerGoneError("the server's process has ended")


def load_engine(config: EngineConfig) -> LLMEngine:
    """Load the model, and prepare constraints concurrently."""
    prefer_short_spins()
    from quire.engine.llm_engine import LLMEngine  # imports torch, which takes seconds; after Hello

    engine = LLMEngine(config)
    collect_seldom()
    threading.Thread(target=engine.grammars.warm, name="quire-warm-grammars", daemon=True).start()
    return engine


def run(load: Callable[[EngineConfig], LLMEngine] = load_engine) -> int:
    """Serve one server until it sends Stop or ends; return the exit status."""
    ignore_signals()
    lifeline = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process
    start = read_start(lifeline)
    setup_logging(start.log_level)
    setup_log_format(start.log_format)
    port: EnginePort | None = None
    try:
        die_with_parent(start.parent_pid)
        port = EnginePort(start, lifeline)
        port.send(Hello(os.getpid(), PROTOCOL_VERSION))
        return _serve(start, port, load)
    except PeerGoneError as error:
        logger.warning("the engine's process ends: %s", error)
        return EXIT_PEER_GONE
    finally:
        if port is not None:
            port.close()


def _serve(start: Start, port: EnginePort, load: Callable[[EngineConfig], LLMEngine]) -> int:
    began_s = time.monotonic()
    engine: LLMEngine | None = None
    kv_events: KvEventPublisher | None = None
    try:
        if start.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(f"the server speaks version {start.protocol_version} of the link, the engine {PROTOCOL_VERSION}")
        engine = load(EngineConfig(**start.config))
        if start.kv_events is not None:
            if not engine.scheduler.config.enable_prefix_caching:
                raise ConfigError("kv_events_endpoint needs enable_prefix_caching: without it no block is ever found again")
            kv_events = KvEventPublisher(start.kv_events, engine.scheduler.kv.block_size)
        if engine.prefill is not None:
            port.wake_on(engine.prefill.wake_fd)
        engine.records_timelines = start.records_timelines
        port.send(Ready(describe_engine(engine, time.monotonic() - began_s)))
        EngineLoop(
            engine,
            port,
            has_workers=engine.config.parallel.world_size > 1,
            kv_events=kv_events,
            counts_experts=counts_experts(engine.config),
        ).run()
        return 0
    except PeerGoneError:
        raise
    except Exception as error:
        is_config = (engine is None or (start.kv_events is not None and kv_events is None)) and isinstance(
            error, _CONFIG_ERRORS
        )
        if is_config:
            logger.debug("%s", error)  # the server shows it to the user
        else:
            logger.exception("the engine failed")
        port.send(Failed(type(error).__name__, str(error), is_config))
        return EXIT_FAILED
    finally:
        if kv_events is not None:
            kv_events.close()
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    sys.exit(run())
