"""The program of the chat template sandbox's processes: Jinja without files and without Python internals.

Time and memory are limited by the sandbox (`base/sandbox.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.base.errors import ModelFormatError
from quire.base.sandbox_server import serve

T = TypeVar("T")

MAX_TEXT_CHARACTERS = 16_000_000
_FILE_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
# Errors that a compiled template can raise: Jinja's and those of Python's operators and methods.
_RUNTIME_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TemplateRefusal(TemplateError):
    """The template called raise_exception."""


class ChatNamespace(Namespace):
    """namespace() without underscored names; it prints as one word, independent of its content."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_namespace_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, without templates in files."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # a template that exceeds the limits fails when it is rendered, not when it is compiled
            extensions=[LoopControlExtension, GenerationTag],
        )
        self.filters["tojson"] = to_json
        self.globals = {
            "range": self.globals["range"],
            "dict": dict_of,
            "namespace": ChatNamespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.Const, nodes.TemplateData)):
            _refuse_surrogates(node)
        for node in tree.find_all(_FILE_NODES):
            kind = type(node).__name__.lower()
            raise TemplateSyntaxError(f"a chat template must not open files, got {{% {kind} %}}", node.lineno)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Fail at once, whereas Jinja's default prints nothing."""
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")
        return super().unsafe_undefined(obj, attribute)


def main() -> None:
    """Serve the sandbox of chat templates."""
    serve(lambda setup: answer_to)


def answer_to(message: dict[str, Any]) -> dict[str, Any]:
    """Return the rendered text of a template; without variables, return the names of the variables that it reads.

    An error has a kind: "format" if the template is damaged, otherwise "refused" or "failed".
    """
    try:
        if message["variables"] is None:
            return {"names": sorted(_naming_errors(_find_variables, message["source"]))}
        return {"text": _render(_naming_errors(_compile, message["source"]), message["variables"])}
    except ModelFormatError as error:
        return {"error": str(error), "kind": "format"}
    except TemplateRefusal as error:
        return {"error": error.message, "kind": "refused"}
    except _RUNTIME_ERRORS as error:
        return {"error": (str(error) or type(error).__name__)[:2000], "kind": "failed"}


def _naming_errors(read: Callable[[str], T], source: str) -> T:
    """Return the result of `read` for a source. Raises ModelFormatError if it is damaged or reads other templates."""
    try:
        return read(source)
    except TemplateSyntaxError as error:
        raise ModelFormatError(f"chat_template is not a valid Jinja template: line {error.lineno}: {error.message}") from error
    except (SecurityError, RecursionError, SyntaxError, MemoryError) as error:
        raise ModelFormatError(f"chat_template is refused: {error}") from error


@lru_cache(maxsize=4)
def _compile(source: str) -> Template:
    return ChatEnvironment().from_string(source)


def _find_variables(source: str) -> set[str]:
    return meta.find_undeclared_variables(ChatEnvironment().parse(source))


def _render(template: Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    num_characters = 0
    for piece in template.root_render_func(template.new_context(variables)):
        pieces.append(piece)
        num_characters += len(piece)
        if num_characters > MAX_TEXT_CHARACTERS:
            raise TemplateError(f"the template writes more than {MAX_TEXT_CHARACTERS} characters")
    return "".join(pieces)


def dict_of(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict; a function, so that templates do not reach the type."""
    return dict(*args, **kwargs)


def to_json(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Return JSON as transformers' filter does; Jinja's own escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object = "") -> None:
    """Let a template refuse its messages."""
    raise TemplateRefusal(str(message)[:2000])


def strftime_now(format: str) -> str:
    """Return the date or time."""
    return datetime.now().strftime(format)


def _check_namespace_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have names with a leading underscore, got {name!r}")


def _refuse_surrogates(node: nodes.Const | nodes.TemplateData) -> None:
    """Raise ModelFormatError for a text that cannot be written as UTF-8, as an escape like '\\ud800' makes one."""
    text = node.value if isinstance(node, nodes.Const) else node.data
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ModelFormatError(
                f"chat_template holds {text[error.start]!r}, a lone surrogate, which is no character: line {node.lineno}"
            ) from None


if __name__ == "__main__":
    main()
