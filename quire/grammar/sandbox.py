"""SandboxedCompiler: compiles constraints in the processes of a Sandbox."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack, cast

from quire.base.sandbox import Sandbox, SandboxClosedError, SandboxLimitError, SandboxLimits, SandboxLostError
from quire.base.sandbox_server import SandboxServerError
from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError, PassingError

_COMMAND = (sys.executable, "-P", "-m", "quire.grammar.sandbox_main")


class SandboxedCompiler(Sandbox):
    """A Sandbox whose messages are constraints and whose errors are GrammarErrors. Thread-safe."""

    def __init__(self, command: tuple[str, ...] = _COMMAND, **limits: Unpack[SandboxLimits]) -> None:
        super().__init__(command, **limits)

    @contextmanager
    def probe(self, setup: dict[str, Any], constraint: Constraint) -> Iterator[dict[str, Any]]:
        """Compile a constraint there and hold the answer, and where it was slow, its place. Raises GrammarError.

        setup  what the process has to know of the vocabulary
        """
        names = ("kind", "source", "whitespace_pattern", "disable_any_whitespace", "max_open_length")
        with _naming_the_cause(self.max_cpu_s), self.ask(setup, {name: getattr(constraint, name) for name in names}) as answer:
            if answer.get("error") is not None:
                raise GrammarError(str(answer["error"]), cast("str | None", answer.get("pointer")))
            yield answer


@contextmanager
def _naming_the_cause(max_cpu_s: float) -> Iterator[None]:
    """Turn the errors of a Sandbox into those of a grammar."""
    try:
        yield
    except SandboxClosedError:
        raise GrammarError("the engine has been closed") from None
    except SandboxLimitError:
        raise GrammarError(
            f"compiling takes more than {max_cpu_s:g} s or the memory that is allowed: make it simpler"
        ) from None
    except SandboxLostError as error:
        ended = "the system has ended the process that compiles it, as it does where memory ends"
        if error.is_final:
            raise GrammarError(f"{ended}, {error.num_lost} times: make it simpler") from None
        raise PassingError(f"{ended}: try again") from None
    except SandboxServerError as error:
        raise PassingError(f"the process that compiles {error}") from None
