"""The process of a CompileServer: reads what a compiler needs, then forks processes that compile, and ends them when told."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.schema_check import iter_tag_schemas
from quire.grammar.schema_faults import find_fault, plain_words
from quire.grammar.spelling import Spelling
from quire.grammar.vocabulary import Vocabulary

_STACK_BYTES = 4 << 20
"""Half of what the engine's threads have: what fits here, fits there."""
_MAX_MESSAGE = 256


def main() -> None:
    """Fork and end processes as the socket asks, whose number is the last argument; end them all when it closes.

    A process that has ended stays unreaped until it is to be ended, so that its number means no other.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[-1]))
    start = json.loads(sys.stdin.buffer.read())
    compiler = _COMPILERS[start["setup"]["backend"]](start["setup"])
    pids: set[int] = set()
    try:
        control.send(b"{}")
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
            if not message:
                break
            if descriptors:
                pids.add(_fork(control, descriptors[0], compiler, start["limits"]))
            else:
                ended = json.loads(message)
                signal_number = _end(ended["end"], pids, ended["is_ending"])
                control.send(json.dumps({"signal": signal_number}).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass  # the engine was killed: there is nobody to tell
    for pid in tuple(pids):
        _end(pid, pids)


def _end(pid: int, pids: set[int], is_ending: bool = False) -> int:
    """Kill a process, or wait for its end; return the signal that has ended it, 0 where it was none or this one's."""
    pids.remove(pid)
    os.kill(pid, signal.SIGCONT if is_ending else signal.SIGKILL)  # it may have been stopped on its way out
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if is_ending and os.WIFSIGNALED(status) else 0


def _fork(control: socket.socket, descriptor: int, compiler: Any, limits: dict[str, Any]) -> int:
    """Let a new process answer at a socket; return its number here."""
    pid = os.fork()
    if pid:
        os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())
        return pid
    try:
        control.close()
        os.setsid()
        with contextlib.suppress(OSError):  # another system than Linux
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # where memory ends, this ends first
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], hard))
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_answer_all, args=(socket.socket(fileno=descriptor), compiler, limits["max_cpu_s"]))
        thread.start()
        thread.join()
    finally:
        os._exit(0)  # what the process that forks has registered for its end is none of this one's


def _answer_all(connection: socket.socket, compiler: Any, max_cpu_s: float) -> None:
    """Answer constraints, line by line, until the other side closes; the system ends the process where one takes too much."""
    try:
        connection.sendall(b"{}\n")
        for line in connection.makefile("rb"):
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF ends a process
            answer = answer_to(compiler, json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(json.dumps(answer).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        pass  # as above


class _LlguidanceCompiler:
    """Compiles with 256 bytes for a vocabulary, and the special tokens."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from quire.grammar.llguidance_backend import make_limits, make_tokenizer

        special = dict(zip(setup["special"], setup["spelled"], strict=True))
        size = max(setup["size"], 256 + len(special))
        tokens = [b""] * size
        for token_id, text in special.items():
            tokens[token_id] = text.encode()
        spare = (token_id for token_id in range(size) if token_id not in special)
        for byte in range(256):
            tokens[next(spare)] = bytes([byte])
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        self._vocabulary = Vocabulary(
            tuple(tokens),
            frozenset(special),
            Spelling(tokens, special, (lambda text: [ids[bytes([byte])] for byte in text.encode()],)),
            lambda text: ids.get(text.encode()),
        )
        self._tokenizer = make_tokenizer(self._vocabulary)
        self._limits = make_limits()

    def compile(self, constraint: Constraint) -> str | None:
        """Return nothing: what can be compiled here is compiled there. Raises GrammarError."""
        from quire.grammar.llguidance_backend import check_ways
        from quire.grammar.llguidance_source import llguidance_source

        source = llguidance_source(constraint, self._vocabulary)
        try:
            matcher = self._compile_source(source)
        except GrammarError as error:
            if constraint.kind == "json_schema":
                raise self._fault(constraint, constraint.parsed(), str(error)) from None
            if constraint.kind == "structural_tag":
                self._check_schemas(constraint)
            raise GrammarError(plain_words(str(error)), error.pointer) from None
        check_ways(matcher, self._vocabulary)
        return None

    def _compile_source(self, source: str) -> Any:
        from quire.grammar.llguidance_backend import compile_source

        return compile_source(self._tokenizer, source, self._limits)

    def _check_schemas(self, constraint: Constraint) -> None:
        """Compile the schemas of a structural tag alone. Raises GrammarError, with its pointer, for the first at fault."""
        for pointer, schema in iter_tag_schemas(constraint.parsed(), ""):
            failure = self._failure(constraint, schema)
            if failure is not None:
                found = self._fault(constraint, schema, failure)
                raise GrammarError(str(found), f"{pointer}{found.pointer or ''}") from None

    def _fault(self, constraint: Constraint, schema: object, message: str) -> GrammarError:
        return find_fault(schema, message, lambda part: self._failure(constraint, part))

    def _failure(self, constraint: Constraint, schema: object) -> str | None:
        """Return what llguidance says of a schema alone, None where nothing is wrong."""
        from quire.grammar.llguidance_source import llguidance_source

        alone = replace(constraint, kind="json_schema", source=json.dumps(schema))
        try:
            self._compile_source(llguidance_source(alone, self._vocabulary))
        except GrammarError as error:
            return str(error)
        return None


def _xgrammar_compiler(setup: dict[str, Any]) -> Any:
    from quire.grammar.xgrammar_backend import ProbedXgrammar

    return ProbedXgrammar(setup)


_COMPILERS: dict[str, Callable[[dict[str, Any]], Any]] = {"llguidance": _LlguidanceCompiler, "xgrammar": _xgrammar_compiler}


def answer_to(compiler: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a constraint."""
    try:
        return {"compiled": compiler.compile(Constraint(**fields))}
    except GrammarError as error:
        return {"error": str(error), "pointer": error.pointer}
    except (MemoryError, RecursionError) as error:
        return {"error": f"it is too complex: {type(error).__name__}", "pointer": None}
    except Exception as error:  # noqa: BLE001 - whatever a constraint does to a compiler, it is told
        return {"error": f"{type(error).__name__}: {error}"[:500], "pointer": None}


if __name__ == "__main__":
    main()
