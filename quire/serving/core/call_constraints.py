"""Tool calls in a model's own format, as parts of a structural tag: required, or allowed in free text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.text.parsing.call_forms import CallForm
from quire.text.parsing.tools import Tool

Format = dict[str, Any]


def calls_of(form: CallForm, tools: Sequence[Tool], strict: frozenset[str], is_parallel: bool) -> Format:
    """Return a format of one or more calls of some tools, and nothing else.

    strict  names of the tools whose arguments must match their schema; other tools accept any arguments
    """
    calls: Format = {
        "type": "tags_with_separator",
        "tags": [_tag(form, tool, tool.name in strict) for tool in tools],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    if not form.opens:
        return calls
    around = [{"type": "const_string", "value": form.opens}, calls, {"type": "const_string", "value": form.closes}]
    return {"type": "sequence", "elements": around}


def text_with_calls(
    form: CallForm, tools: Sequence[Tool], strict: frozenset[str], is_parallel: bool, openings: tuple[str, ...] = ()
) -> Format:
    """Return free text that may contain calls of some tools; in formats without a trigger, either text or calls.

    openings  openings of reasoning after which calls could begin; they are excluded from such a text
    """
    if form.content:
        return _contents_and_calls(form, tools, strict)
    if not form.trigger:
        return _text_or_calls(form, tools, strict, is_parallel, openings)
    if not form.opens:
        tags = [_tag(form, tool, tool.name in strict) for tool in tools]
    else:
        calls = calls_of(form, tools, strict, is_parallel)["elements"][1]
        tags = [{"type": "tag", "begin": form.opens, "content": calls, "end": form.closes}]
    return {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, "excludes": list(form.banned)}


def _contents_and_calls(form: CallForm, tools: Sequence[Tool], strict: frozenset[str]) -> Format:
    """Return texts and calls with an opener before each; if the prompt ends with the first opener, either begins at once."""
    content = {"type": "tag", "begin": form.content, "content": {"type": "const_string", "value": ""}, "end": ""}
    parts = [*(_tag(form, tool, tool.name in strict) for tool in tools), content]
    tags = [{**part, "begin": f"{form.trigger}{part['begin']}"} for part in parts]
    rest: Format = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, "excludes": list(form.banned)}
    if form.opens:
        return rest
    first = {"type": "tags_with_separator", "tags": parts, "separator": "", "at_least_one": True, "stop_after_first": True}
    return {"type": "sequence", "elements": [first, rest]}


def _text_or_calls(
    form: CallForm, tools: Sequence[Tool], strict: frozenset[str], is_parallel: bool, openings: tuple[str, ...]
) -> Format:
    names = "|".join(re.escape(tool.name) for tool in tools)
    text = {
        "type": "any_text",
        "excludes": [*form.banned, *openings],
        "begins_without": form.start.replace("{names}", names),
    }
    found = calls_of(form, tools, strict, is_parallel)
    if form.opens:
        calls = {**found["elements"][1], "begin": form.opens}
        found = {"type": "sequence", "elements": [calls, found["elements"][2]]}
    return {"type": "or", "elements": [found, text]}


def arguments_of(tool: Tool, is_strict: bool, style: str = "json") -> Format:
    """Return the arguments of a call, an object. Raises RequestError if the tool's schema allows none."""
    schema: Mapping[str, object] = tool.parameters if is_strict else {}
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise RequestError(f"tools: the parameters of {tool.name!r} must allow an object, got the type {types!r:.100}", "tools")
    return {"type": "json_schema", "json_schema": {**schema, "type": "object"}, "style": style}


def _tag(form: CallForm, tool: Tool, is_strict: bool) -> Format:
    if form.content and form.begin_of(tool.name) == form.content:
        raise RequestError(
            f"tools: {tool.name!r} is what this model calls text, so that calls of it cannot be enforced", "tools"
        )
    arguments = arguments_of(tool, is_strict, form.style)
    begin, number, rest = form.begin_of(tool.name).partition("{number}")
    if number:
        digits = {"type": "regex", "pattern": "0|[1-9][0-9]{0,3}"}
        arguments = {"type": "sequence", "elements": [digits, {"type": "const_string", "value": rest}, arguments]}
    return {"type": "tag", "begin": begin, "content": arguments, "end": form.end}
