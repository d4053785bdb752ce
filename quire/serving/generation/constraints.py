"""What the whole output of a conversation has to match: reasoning, then the answer or calls of tools, in one grammar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.base.errors import RequestError
from quire.contracts.constraint import Constraint, dump_json
from quire.serving.generation.plan import ChatInput, ParserSetup
from quire.text.parsing.call_forms import CALL_FORMS, CallForm
from quire.text.parsing.formats import ReasoningFormat, find_reasoning_format
from quire.text.parsing.tools import Tool

Format = dict[str, Any]

_GAP: Format = {"type": "regex", "pattern": r"\n{0,2}"}
"""Between reasoning and what follows; the parser does not count it."""


def chat_constraint(answer: Constraint | None, chat: ChatInput, setup: ParserSetup | None, prompt: str) -> Constraint | None:
    """Return the constraint of a conversation's output, None where anything may come. Raises RequestError.

    answer  what the answer has to match where no tool is called
    setup   the formats of the model's output
    prompt  the rendered conversation, which may have begun or ended the reasoning
    """
    calls = _calls(chat, setup, answer is not None)
    reasoning = None if setup is None else find_reasoning_format(setup.reasoning_format)
    if answer is None and calls is None:
        return None
    if calls is None and (reasoning is None or setup is None or _is_closed(prompt, reasoning)):
        return answer
    wanted = _either(answer, calls, chat)
    if reasoning is not None and setup is not None and not _is_closed(prompt, reasoning):
        wanted = _after_reasoning(wanted, reasoning, setup)
    param = "tool_choice" if chat.forced_tools else "tools" if answer is None else answer.param
    source = dump_json({"type": "structural_tag", "format": wanted}, param)
    names = () if calls is None or setup is None else tuple(f"tool {tool.name!r}" for tool in _tools_of(chat, setup))
    if answer is None:
        return Constraint(kind="structural_tag", source=source, param=param, schema_names=names)
    if answer.kind == "structural_tag":
        return replace(answer, source=source, param=param)
    return replace(answer, kind="structural_tag", source=source, param=param, schema_names=names or (answer.param,))


def schema_constraint(schema: Any, param: str) -> Constraint:
    """Return the constraint of an answer that is JSON of a schema. Raises RequestError."""
    return Constraint(kind="json_schema", source=dump_json(schema, param), param=param)


def _either(answer: Constraint | None, calls: Format | None, chat: ChatInput) -> Format:
    if calls is None:
        return _format_of(answer)
    if answer is None or chat.forced_tools:
        return calls
    return {"type": "or", "elements": [_format_of(answer), _calls_alone(calls)]}


def _calls_alone(calls: Format) -> Format:
    """Return calls without the free text in which they might stand: the answer has a form of its own."""
    if calls["type"] != "triggered_tags":
        return calls
    return {"type": "tags_with_separator", "tags": calls["tags"], "separator": "\n", "at_least_one": True}


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
        f"{answer.param}: a {answer.kind} cannot be put behind the model's reasoning: turn its thinking off, or ask for "
        "JSON, a regex, a choice or a structural tag with a format",
        answer.param,
    )


def _calls(chat: ChatInput, setup: ParserSetup | None, has_answer: bool) -> Format | None:
    """Return the format of the calls that are demanded, have to be right, or may come instead of the answer; None for none."""
    param = "tool_choice" if chat.forced_tools else "tools"
    name = None if setup is None else setup.tool_format
    form = None if name is None else CALL_FORMS.get(name)
    if not chat.forced_tools and not chat.strict_tools and (not has_answer or form is None):
        return None
    if setup is None or form is None:
        raise RequestError(
            f"{param}: the calls of this model's format ({name}) cannot be enforced; possible are {', '.join(CALL_FORMS)}. "
            "Leave tool_choice 'auto' and strict out",
            param,
        )
    tags = [
        _tag(form, tool.name, tool.parameters, bool(chat.forced_tools) or tool.name in chat.strict_tools)
        for tool in _tools_of(chat, setup)
    ]
    missing = set(chat.forced_tools) - {tool.name for tool in setup.tools}
    if missing:
        raise RequestError(f"{param}: there is no tool {sorted(missing)[0]!r} among the tools", param)
    if chat.forced_tools:
        return _sequence_of(form, tags, chat.parallel_tool_calls)
    if not form.trigger:
        raise RequestError(f"tools: strict cannot be enforced in this model's format ({name}) with tool_choice 'auto'", "tools")
    return {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}


def _tools_of(chat: ChatInput, setup: ParserSetup) -> list[Tool]:
    """Return the tools that may be called, in the order of their tags."""
    return [tool for tool in setup.tools if not chat.forced_tools or tool.name in chat.forced_tools]


def _tag(form: CallForm, name: str, parameters: Any, is_strict: bool) -> Format:
    schema = dict(parameters) if is_strict else {}
    schema.setdefault("type", "object")
    return {
        "type": "tag",
        "begin": form.begin_of(name),
        "content": {"type": "json_schema", "json_schema": schema},
        "end": form.end,
    }


def _sequence_of(form: CallForm, tags: list[Format], is_parallel: bool) -> Format:
    calls: Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    if not form.opens:
        return calls
    around = [{"type": "const_string", "value": form.opens}, calls, {"type": "const_string", "value": form.closes}]
    return {"type": "sequence", "elements": around}


def _after_reasoning(wanted: Format, reasoning: ReasoningFormat, setup: ParserSetup) -> Format:
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": list(reasoning.closes)}
    if setup.starts_in_reasoning:
        return {"type": "sequence", "elements": [thought, _GAP, wanted]}
    openings = [{**thought, "begin": opener} for opener in reasoning.opens]
    thoughts = openings[0] if len(openings) == 1 else {"type": "or", "elements": openings}
    with_thought = {"type": "sequence", "elements": [thoughts, _GAP, wanted]}
    return {"type": "or", "elements": [with_thought, wanted]}


def _is_closed(prompt: str, reasoning: ReasoningFormat) -> bool:
    """Whether the prompt ends with reasoning that is over: the template has turned it off."""
    return prompt.rstrip().endswith(reasoning.closes)
