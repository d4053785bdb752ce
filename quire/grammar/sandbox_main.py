"""What runs in the processes of a SandboxedCompiler: compilers of constraints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.base.sandbox_server import serve
from quire.contracts.constraint import Constraint
from quire.grammar.errors import GrammarError
from quire.grammar.schema_check import iter_tag_schemas
from quire.grammar.schema_faults import find_fault, plain_words
from quire.grammar.spelling import Spelling
from quire.grammar.vocabulary import Vocabulary


def main() -> None:
    """Serve a SandboxedCompiler."""
    serve(_prepare)


def _prepare(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    compiler = _COMPILERS[setup["backend"]](setup)
    return lambda fields: answer_to(compiler, fields)


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
    """Return the answer about a constraint."""
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
