"""A replica's process for LLM: `python -m quire.engine.replica_process FD`, with a connection to its parent."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from quire.base.errors import QuireError, RequestError
from quire.base.logging import setup_logging
from quire.base.threads import prefer_short_spins
from quire.engine.replica_messages import (
    AdapterAnswer,
    AdapterCommand,
    Command,
    Loaded,
    LoadFailed,
    Output,
    SleepAnswer,
    SleepCommand,
)

if TYPE_CHECKING:  # it imports torch, after the first message
    from quire.engine.llm_engine import LLMEngine


def main(connection: Connection) -> int:
    """Run one replica until the other end of the connection is closed; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent handles it
    config, log_level = connection.recv()
    setup_logging(logging.getLevelName(log_level))
    prefer_short_spins()
    from quire.engine.llm_engine import LLMEngine  # loads torch

    try:
        engine = LLMEngine(config)
    except Exception as error:  # noqa: BLE001 - who started this process says it
        known = error if isinstance(error, QuireError) else None
        connection.send(LoadFailed(known, f"{type(error).__name__}: {error}"))
        return 1
    commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), name="quire-commands", daemon=True).start()
    try:
        connection.send(Loaded(engine.report, engine.scheduler.config))
        while True:
            is_idle = not engine.has_unfinished_requests()
            while is_idle or not commands.empty():
                command = commands.get()
                if command is None:
                    return 0
                answer = _handle_command(engine, command)
                if answer is not None:
                    connection.send(answer)
                is_idle = not engine.has_unfinished_requests()
            for output in engine.step():
                connection.send(output)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    finally:
        engine.close()


def _read(connection: Connection, commands: queue.SimpleQueue[Command | None]) -> None:
    """Put received messages into the queue, and None at the end."""
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):
        commands.put(None)


def _handle_command(engine: LLMEngine, command: Command) -> Output | None:
    if isinstance(command, SleepCommand):
        return SleepAnswer(_follow_sleep(engine, command))
    if isinstance(command, str):
        engine.abort_request(command)
        return None
    if isinstance(command, AdapterCommand):
        return _handle_adapter(engine, command)
    try:
        engine.submit(command, "final")
    except RequestError as error:
        return command.request_id, error
    return None


def _handle_adapter(engine: LLMEngine, command: AdapterCommand) -> AdapterAnswer:
    is_changed, refusal = False, None
    try:
        if command.action == "add" and command.lora is not None:
            is_changed = engine.add_lora(command.lora)
        elif command.action == "remove":
            is_changed = engine.remove_lora(command.lora_int_id)
    except RequestError as error:
        refusal = error
    return AdapterAnswer(is_changed, frozenset(engine.list_loras()), refusal)


def _follow_sleep(engine: LLMEngine, command: SleepCommand) -> QuireError | None:
    try:
        if command.level is None:
            engine.wake_up()
        else:
            engine.begin_sleep(command.level)
            while engine.has_unfinished_requests():
                engine.step()
    except QuireError as error:
        return error
    return None


if __name__ == "__main__":
    status = main(Connection(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(status)  # the reading thread could block the interpreter's exit
