"""What a chat template may call: its global functions, the methods of strings, and the limits of formats."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.utils import Namespace

from quire.text.template_budget import MAX_INTEGER_BITS, TemplateLimitError

MAX_WIDTH = 1_000_000
_MAX_INDENT = 64
_STRING_METHODS = """
capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier islower
isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind
rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
STRING_METHODS = frozenset(_STRING_METHODS.split())


class TemplateRefusal(TemplateError):
    """The template called raise_exception."""


class ChatNamespace(Namespace):
    """namespace() without underscored names; it prints as one word, whatever it holds."""

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


def dict_of(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict; a function, so that templates do not reach the type."""
    return dict(*args, **kwargs)


def _check_namespace_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have names with a leading underscore, got {name!r}")


def check_widths(pattern: str) -> None:
    """Refuse a format whose widths and precisions could make a huge text, or are given as values."""
    width = sum(int(digits[:10]) for digits in re.findall(r"\d{2,}", pattern))
    if width > MAX_WIDTH:
        raise TemplateLimitError(f"the template formats with a width of {width}, the most is {MAX_WIDTH}")
    if re.search(r":[^{}]*\{|%[^a-zA-Z%]*\*", pattern):
        raise TemplateLimitError("the template formats with a width given as a value: write it into the format")


def check_integer(value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"the template makes an integer of more than {MAX_INTEGER_BITS} bits")


def to_json(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    # transformers' filter: Jinja's own escapes HTML.
    for size in (indent, *(separators or ())):
        if (len(size) if isinstance(size, str) else size or 0) > _MAX_INDENT:
            raise TemplateLimitError(f"tojson indents by at most {_MAX_INDENT}, got {size!r:.80}")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object = "") -> None:
    raise TemplateRefusal(str(message)[:2000])


def strftime_now(format: str) -> str:
    check_widths(format)
    return datetime.now().strftime(format)
