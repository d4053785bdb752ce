"""The constraint of a conversation's whole output: reasoning, then the answer or tool calls, in one grammar."""

from __future__ import annotations

from dataclasses import replace

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint, dump_json
from quire.serving.core import harmony_constraints
from quire.serving.core.call_constraints import Format, calls_of, text_with_calls
from quire.serving.core.plan import ChatInput, ParserSetup
from quire.text.parsing.call_forms import CALL_FORMS
from quire.text.parsing.formats import (
    FALLBACK_TOOL_FORMAT,
    ReasoningFormat,
    find_reasoning_format,
    find_tool_format,
    is_harmony,
)
from quire.text.parsing.tools import Tool

_GAP: Format = {"type": "regex", "pattern": r"\n{0,2}"}
"""Whitespace between reasoning and the rest; the parser ignores it."""


def chat_constraint(answer: Constraint | None, chat: ChatInput, setup: ParserSetup | None, prompt: str) -> Constraint | None:
    """Return the constraint of a conversation's output, None if it is free. Raises RequestError.

    answer  the constraint of the answer if no tool is called
    setup   the formats of the model's output
    prompt  the rendered conversation, which may contain the start or the end of the reasoning
    """
    check_tools(chat, setup)
    if setup is not None and is_harmony(setup.tool_format, setup.reasoning_format):
        wanted = _harmony(answer, chat, setup)
    else:
        wanted = _marked(answer, chat, setup, prompt)
    if wanted is None:
        return answer
    param = "tool_choice" if chat.forced_tools else "tools" if answer is None else answer.param
    source = dump_json({"type": "structural_tag", "format": wanted}, param)
    names = () if setup is None else tuple(f"tool {tool.name!r}" for tool in _tools_of(chat, setup))
    if answer is None or chat.forced_tools:
        return Constraint(kind="structural_tag", source=source, param=param, schema_names=names or (param,))
    if answer.kind == "structural_tag":
        return replace(answer, source=source, param=param)
    return replace(answer, kind="structural_tag", source=source, param=param, schema_names=names or (answer.param,))


def _marked(answer: Constraint | None, chat: ChatInput, setup: ParserSetup | None, prompt: str) -> Format | None:
    """Return the output of a format with markers, None if the answer's constraint is enough."""
    calls = _calls(chat, setup, answer is not None)
    reasoning = None if setup is None else find_reasoning_format(setup.reasoning_format)
    if setup is None or reasoning is None or _is_closed(prompt, reasoning):
        return calls if calls is None or answer is None or chat.forced_tools else _either(answer, calls)
    if answer is None and calls is None:
        return None
    wanted = _format_of(answer) if calls is None else calls if answer is None or chat.forced_tools else _either(answer, calls)
    return _after_reasoning(wanted, reasoning, setup, _call_openings(setup) if chat.forced_tools or chat.strict_tools else ())


def _call_openings(setup: ParserSetup) -> tuple[str, ...]:
    """Return the texts that begin a call, and so end the reasoning, even inside of it."""
    row = find_tool_format(setup.tool_format)
    return () if row is None else (*row.openers, *row.sections)


def _harmony(answer: Constraint | None, chat: ChatInput, setup: ParserSetup) -> Format | None:
    """Return the output of the format with channels (harmony), None if it is free."""
    if answer is None and not chat.forced_tools and not chat.strict_tools:
        return None
    calls = None
    if setup.tools:
        calls = harmony_constraints.calls_of(_tools_of(chat, setup), _strict_of(chat), chat.parallel_tool_calls)
    final = None if chat.forced_tools else harmony_constraints.free_answer() if answer is None else _format_of(answer)
    return harmony_constraints.messages_of(
        final, calls, starts_in_reasoning=setup.starts_in_reasoning, has_preamble=answer is None
    )


def schema_constraint(schema: object, param: str) -> Constraint:
    """Return the constraint of an answer that is JSON of a schema. Raises RequestError."""
    return Constraint(kind="json_schema", source=dump_json(schema, param), param=param)


def _either(answer: Constraint | None, calls: Format) -> Format:
    return {"type": "or", "elements": [_format_of(answer), calls]}


def _format_of(answer: Constraint | None) -> Format:
    if answer is None or answer.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if answer.kind == "json_schema":
        return {"type": "json_schema", "json_schema": answer.parsed()}
    if answer.kind == "regex":
        return {"type": "regex", "pattern": answer.source}
    if answer.kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in answer.parsed()]}
    if answer.kind == "structural_tag" and "format" in answer.parsed():
        return answer.parsed()["format"]
    raise RequestError(
        f"{answer.param}: a {answer.kind} cannot be combined with tool calls or with the model's reasoning: leave the "
        "tools out and turn its thinking off, or ask for JSON, a regex, a choice or a structural tag with a format",
        answer.param,
    )


def check_tools(chat: ChatInput, setup: ParserSetup | None) -> None:
    """Raise RequestError if a required tool does not exist."""
    missing = set(chat.forced_tools) - {tool.name for tool in setup.tools} if setup is not None else set(chat.forced_tools)
    if missing:
        raise RequestError(f"tool_choice: there is no tool {sorted(missing)[0]!r} among the tools", "tool_choice")


def _calls(chat: ChatInput, setup: ParserSetup | None, has_answer: bool) -> Format | None:
    """Return the format of calls that are required, strict, or possible instead of the answer; None for none."""
    name = None if setup is None else setup.tool_format
    form = None if name is None else CALL_FORMS.get(name)
    if setup is None or not setup.tools:
        return None
    is_free = not chat.forced_tools and not chat.strict_tools and name != FALLBACK_TOOL_FORMAT
    if is_free and (not has_answer or form is None):
        return None
    if form is None:
        param = "tool_choice" if chat.forced_tools else "tools"
        raise RequestError(
            f"{param}: the calls of this model's format ({name}) cannot be enforced; possible are "
            f"{', '.join((*CALL_FORMS, 'openai'))}. Leave tool_choice 'auto' and strict out",
            param,
        )
    if setup.starts_in_call:
        form = replace(form, opens="")
    tools, strict = _tools_of(chat, setup), _strict_of(chat)
    if chat.forced_tools or has_answer:
        return calls_of(form, tools, strict, chat.parallel_tool_calls)
    reasoning = find_reasoning_format(setup.reasoning_format)
    return text_with_calls(form, tools, strict, chat.parallel_tool_calls, () if reasoning is None else reasoning.opens)


def _tools_of(chat: ChatInput, setup: ParserSetup) -> list[Tool]:
    """Return the tools that may be called, in the order of their tags."""
    return [tool for tool in setup.tools if not chat.forced_tools or tool.name in chat.forced_tools]


def _strict_of(chat: ChatInput) -> frozenset[str]:
    return frozenset(chat.forced_tools) | chat.strict_tools


def _after_reasoning(wanted: Format, reasoning: ReasoningFormat, setup: ParserSetup, banned: tuple[str, ...]) -> Format:
    text = {"type": "any_text", "excludes": list(banned)}
    thought = {"type": "tag", "begin": "", "content": text, "end": list(reasoning.closes)}
    if setup.starts_in_reasoning:
        return {"type": "sequence", "elements": [thought, _GAP, wanted]}
    openings = [{**thought, "begin": opener} for opener in reasoning.opens]
    thoughts = openings[0] if len(openings) == 1 else {"type": "or", "elements": openings}
    with_thought = {"type": "sequence", "elements": [thoughts, _GAP, wanted]}
    return {"type": "or", "elements": [with_thought, wanted]}


def _is_closed(prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether the prompt ends with closed reasoning: the template has turned reasoning off."""
    return prompt.rstrip().endswith(reasoning.closes)
