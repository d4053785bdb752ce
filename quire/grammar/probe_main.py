"""The process of a Prober: a line of limits in, then a line per constraint, each answered by a line."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.schema_check import explain
from quire.grammar.vocabulary import Vocabulary

_STACK_BYTES = 4 << 20


def main() -> None:
    """Answer until the input ends; the system ends the process where a constraint takes more than is allowed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    limits = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], hard))
    compilers: dict[str, Any] = {}
    _say(answers, {})
    for line in sys.stdin:
        message = json.loads(line)
        key = json.dumps(message["setup"])
        if key not in compilers:
            compilers[key] = _COMPILERS[message["setup"]["backend"]](message["setup"])
        signal.setitimer(signal.ITIMER_PROF, limits["max_cpu_s"])  # SIGPROF ends a process
        answer = answer_to(compilers[key], message["constraint"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answers, answer)


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


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
            lambda text: [ids[bytes([byte])] for byte in text.encode()],
            lambda text: ids.get(text.encode()),
        )
        self._tokenizer = make_tokenizer(self._vocabulary)
        self._limits = make_limits()

    def compile(self, constraint: Constraint) -> str | None:
        """Return nothing: what can be compiled here is compiled there. Raises GrammarError."""
        from quire.grammar.llguidance_backend import compile_source
        from quire.grammar.llguidance_source import llguidance_source

        source = llguidance_source(constraint, self._vocabulary)
        try:
            compile_source(self._tokenizer, source, self._limits)
        except GrammarError as error:
            raise (explain(str(error), constraint.parsed()) if constraint.kind == "json_schema" else error) from None
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


def _main_until_nobody_listens() -> None:
    try:
        main()
    except BrokenPipeError:  # the engine was killed: there is nobody to tell
        os._exit(0)


def run() -> None:
    """Run main with half of the stack that the engine's threads have: what fits here, fits there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_main_until_nobody_listens)
    thread.start()
    thread.join()


if __name__ == "__main__":
    run()
