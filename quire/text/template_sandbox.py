"""The Jinja environment of chat templates: no files, no Python internals, and every loop, call and text is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import meta, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.base.errors import ModelFormatError, RequestError
from quire.text.template_budget import (
    CHARACTERS_PER_UNIT,
    MAX_INTEGER_BITS,
    MAX_LIST_ITEMS,
    MAX_TEXT_CHARACTERS,
    TemplateLimitError,
    WorkBudget,
)
from quire.text.template_functions import (
    STRING_METHODS,
    ChatNamespace,
    TemplateRefusal,
    check_integer,
    check_widths,
    dict_of,
    raise_exception,
    strftime_now,
    to_json,
)
from quire.text.template_rewrite import rewrite

_MAX_FILTER_SIZES = {"round": 100, "batch": 10_000, "slice": 10_000}
# Methods that compare every character of the text with every one of their argument, at worst.
_PRODUCT_METHODS = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"))
_COMPARISONS_PER_UNIT = 256
# A call or a filter takes as long as a few rounds of a loop.
_CALL_UNITS = 4
# What may fail in a template that was compiled: Jinja's own errors and those of Python's operators and methods.
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
# Filters that look at no more than the first level of a value; other allowed filters are charged its whole weight.
_SHALLOW = """
attr batch count d default dictsort first items last length list map reject rejectattr reverse round select selectattr slice
"""
_DEEP = """
abs capitalize center e escape float forceescape format groupby indent int join lower max min replace safe sort string
sum title trim truncate unique upper wordcount
"""
_COMPARING = "eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in"
_SHALLOW_FILTERS = frozenset(_SHALLOW.split())
_ALLOWED_FILTERS = _SHALLOW_FILTERS | frozenset(_DEEP.split())
_TEXT_FILTERS = frozenset(("format", "indent", "replace", "title", "trim", "wordcount"))
_SLOW_TEXT_FILTERS = frozenset(("title", "wordcount"))
_SLOW_TEXT_FACTOR = 16


class CompiledTemplate:
    """A compiled chat template; may be rendered from several threads."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        self._environment = environment
        self._template = environment.from_string(source)

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text. Raises RequestError where the template fails, refuses or does too much."""
        try:
            return "".join(self._generate(variables))
        except TemplateRefusal as error:
            raise RequestError(f"the chat template refuses these messages: {error.message}", "messages") from error
        except _RUNTIME_ERRORS as error:
            reason = str(error) or type(error).__name__
            raise RequestError(f"chat_template failed: {reason}", "chat_template") from error

    def _generate(self, variables: dict[str, Any]) -> list[str]:
        budget = self._environment.start(variables)
        pieces: list[str] = []
        num_characters = 0
        for piece in self._template.root_render_func(self._template.new_context(variables)):
            pieces.append(piece)
            num_characters += len(piece)
            budget.charge(1)
            if num_characters > MAX_TEXT_CHARACTERS:
                raise TemplateLimitError(f"the template writes more than {MAX_TEXT_CHARACTERS} characters")
        return pieces


def compile_template(source: str) -> CompiledTemplate:
    """Compile a chat template. Raises ModelFormatError if it is not valid or wants to read other templates."""
    try:
        return CompiledTemplate(ChatEnvironment(), source)
    except TemplateSyntaxError as error:
        raise ModelFormatError(f"chat_template is not a valid Jinja template: line {error.lineno}: {error.message}") from error
    except (SecurityError, RecursionError, SyntaxError, MemoryError) as error:
        raise ModelFormatError(f"chat_template is refused: {error}") from error


def variables_of(source: str) -> frozenset[str]:
    """Return the names that a chat template reads without having set them. Raises ModelFormatError if it is not valid."""
    try:
        return frozenset(meta.find_undeclared_variables(ChatEnvironment().parse(source)))
    except TemplateSyntaxError as error:
        raise ModelFormatError(f"chat_template is not a valid Jinja template: line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ModelFormatError(f"chat_template is refused: {error}") from error


class GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Counts the work of the templates that it compiled; `start` gives a thread's next rendering its budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else constants, 'a' * 10**9 through a filter, would be computed when compiling
            extensions=[LoopControlExtension, GenerationTag],
            finalize=pass_context(lambda _, value: self.budget.charge_value(value)),
        )
        self._local = threading.local()
        allowed = {name: function for name, function in self.filters.items() if name in _ALLOWED_FILTERS}
        allowed["tojson"] = to_json
        self.filters = {name: self._count_filter(name, function) for name, function in allowed.items()}
        self.filters["quire charge"] = lambda value: self.budget.charge_value(value)
        self.filters["quire count"] = lambda value, weight: self._count_rounds(value, weight)
        self.filters["quire slice"] = self._slice
        for name in _COMPARING.split():
            self.tests[name] = self._count_test(self.tests[name])
        self.globals = {
            "range": self.globals["range"],
            "dict": dict_of,
            "namespace": ChatNamespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }

    @property
    def budget(self) -> WorkBudget:
        """The budget of the rendering in this thread."""
        return self._local.budget

    def start(self, variables: dict[str, Any]) -> WorkBudget:
        """Give the rendering that this thread begins its budget."""
        self._local.budget = WorkBudget(variables)
        return self._local.budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.Const, nodes.TemplateData)):
            _refuse_surrogates(node)
        return rewrite(tree, CHARACTERS_PER_UNIT)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STRING_METHODS
        if isinstance(obj, int | float | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")
        return super().unsafe_undefined(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.budget.charge_value(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.charge(_CALL_UNITS)
        if isinstance(__obj, Macro):
            return budget.charge_value(super().call(__context, __obj, *args, **kwargs))
        if isinstance(__obj, LoopContext):
            args = (budget.count(args[0]), *args[1:]) if args else args
        else:
            args = tuple([budget.charge_value(_listed(value, budget)) for value in args])
            for value in kwargs.values():
                budget.charge_value(value)
            __self._check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.charge(1)
        if operator == "+" and isinstance(left, str | list | tuple):
            self._check_sequence(left, len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            self._check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self.budget.charge_value(left)
            self.budget.charge_value(right)
            check_widths(left)
        result = super().call_binop(context, operator, left, right)
        check_integer(result)
        return result

    def _check_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Charge a method of a string or list for its text, and refuse one that would make too long a result."""
        name = getattr(method, "__name__", "")
        # The sandbox wraps str.format and str.format_map; the original is kept in __wrapped__.
        owner = getattr(getattr(method, "__wrapped__", method), "__self__", None)
        if isinstance(owner, list | tuple):
            self.budget.charge_value(owner)
        if not isinstance(owner, str):
            return
        if name not in STRING_METHODS:
            raise SecurityError(f"a chat template must not use str.{name}")
        self.budget.charge_value(owner)
        values = (*args, *kwargs.values())
        self._check_sizes(values, MAX_LIST_ITEMS)
        if name == "format":
            check_widths(owner)
        elif name == "replace" and len(values) >= 2 and isinstance(values[0], str) and isinstance(values[1], str):
            self._check_replace(owner, values[0], values[1])
        elif name == "join" and args and hasattr(args[0], "__len__"):
            self.budget.check_text(len(owner) * len(args[0]))
        elif name in ("split", "rsplit", "splitlines"):
            separator = values[0] if values and isinstance(values[0], str) and values[0] else None
            self.budget.charge(len(owner) // 4 if separator is None else owner.count(separator))
        if name in _PRODUCT_METHODS:
            self._charge_product(owner, values)

    def _check_sizes(self, values: Iterable[Any], limit: int) -> None:
        """Charge integers that may be widths or counts, and refuse those beyond the limit."""
        for value in values:
            if isinstance(value, int):
                if abs(value) > limit:
                    raise TemplateLimitError(f"the template asks for a size of {value}, the most is {limit}")
                self.budget.charge(abs(value) // CHARACTERS_PER_UNIT)

    def _charge_product(self, text: str, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, str):
                self.budget.charge(len(text) * len(value) // _COMPARISONS_PER_UNIT)

    def _check_replace(self, text: str, old: str, new: str) -> None:
        self.budget.check_text(len(text) + text.count(old) * len(new))

    def _check_sequence(self, value: Any, length: int) -> None:
        if isinstance(value, str):
            self.budget.check_text(length)
        elif length > MAX_LIST_ITEMS:
            raise TemplateLimitError(f"the template makes a list of more than {MAX_LIST_ITEMS} items")
        else:
            self.budget.charge(length // 8)

    def _check_product(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                self._check_sequence(value, len(value) * times)

    def _check_power(self, base: Any, exponent: Any) -> None:
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_INTEGER_BITS:
            raise TemplateLimitError(f"the template makes an integer of more than {MAX_INTEGER_BITS} bits")

    def _count_rounds(self, iterable: Any, weight: int) -> Any:
        """Charge a loop for its rounds, `weight` units each for the text that its body writes."""
        budget = self.budget
        if weight <= 1:
            return budget.count(iterable)
        return _charge_each(iterable, budget, weight)

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        if isinstance(value, str):
            self.budget.charge_value(value)
        elif isinstance(value, list | tuple):
            self.budget.charge(1 + len(value) // 8)
        return value[start:stop:step]

    def _count_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that it is charged for what it reads; marks such as pass_context stay."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0
        is_deep = name not in _SHALLOW_FILTERS

        def counted(*args: Any, **kwargs: Any) -> Any:
            passed, (value, *options) = args[:num_passed], args[num_passed:]
            budget = self.budget
            budget.charge(_CALL_UNITS)
            for option in (*options, *kwargs.values()):
                budget.charge_value(option)
            if name not in ("d", "default", "map"):
                self._check_sizes((*options, *kwargs.values()), _MAX_FILTER_SIZES.get(name, MAX_LIST_ITEMS))
            if isinstance(value, str) or name in _TEXT_FILTERS:
                budget.charge_value(value)
                value = value if isinstance(value, str) else str(value)
                self._charge_text_filter(name, value, options, kwargs)
            elif is_deep and name != "sum":
                value = budget.charge_value(value if hasattr(value, "__len__") else _listed(value, budget))
            elif hasattr(value, "__iter__"):
                value = budget.count(value)
            if name == "join":
                self._check_join(value, *options, **kwargs)
            elif name == "sum" and not all(isinstance(start, int | float) for start in (*options[1:], kwargs.get("start", 0))):
                raise TemplateLimitError("sum must start with a number")
            return function(*passed, value, *options, **kwargs)

        if num_passed:
            counted.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return counted

    def _check_join(self, value: Any, d: Any = "", attribute: Any = None) -> None:
        if hasattr(value, "__len__"):
            self.budget.check_text(len(str(d)) * len(value))

    def _charge_text_filter(self, name: str, text: str, options: list[Any], kwargs: dict[str, Any]) -> None:
        values = [*options, *kwargs.values()]
        if name in _SLOW_TEXT_FILTERS:
            self.budget.check_text(len(text) * _SLOW_TEXT_FACTOR)
        elif name == "format":
            check_widths(text)
        elif name == "trim":
            self._charge_product(text, values)
        elif name == "replace":
            texts = [str(value) for value in (*options, *(kwargs[key] for key in ("old", "new") if key in kwargs))]
            if len(texts) >= 2:
                self._check_replace(text, texts[0], texts[1])
        elif name == "indent":
            widths = [len(value) if isinstance(value, str) else int(value) for value in values if isinstance(value, str | int)]
            self.budget.check_text((len(text.splitlines()) + 1) * max([4, *widths]))

    def _count_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            for value in args:
                self.budget.charge_value(value)
            return function(*args)

        return counted


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


def _charge_each(iterable: Iterable[Any], budget: WorkBudget, weight: int) -> Iterable[Any]:
    for item in iterable:
        budget.charge(weight)
        yield item


def _listed(value: Any, budget: WorkBudget) -> Any:
    """Return the items of a lazy iterable, each counted, as a list; other values as they are."""
    return list(budget.count(value)) if hasattr(value, "__next__") else value
