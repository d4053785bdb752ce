"""Outputs that are messages with a header, <|channel|>analysis<|message|>...<|end|>, as a structural tag."""

from __future__ import annotations

from collections.abc import Sequence

from quire.serving.core.call_constraints import Format, arguments_of
from quire.text.parsing.formats import TOOL_FORMATS
from quire.text.parsing.tools import Tool

_NEXT = "<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>"
_MARKERS = list(TOOL_FORMATS["openai"].openers)
_TEXT: Format = {"type": "any_text", "excludes": _MARKERS}


def messages_of(answer: Format | None, calls: Format | None, *, starts_in_reasoning: bool, has_preamble: bool) -> Format:
    """Return analysis messages, and then an answer or calls.

    answer        the format of the final message; None: there is none
    has_preamble  messages to the user may come before it
    """
    ends = [{"type": "sequence", "elements": [_const(_FINAL), answer]}] if answer is not None else []
    ends += [calls] if calls is not None else []
    before = [_message("<|channel|>analysis<|message|>")]
    before += [_message("<|channel|>commentary<|message|>")] if has_preamble else []
    thoughts: Format = {"type": "tags_with_separator", "tags": before, "separator": "", "at_least_one": False}
    elements = [thoughts, ends[0] if len(ends) == 1 else {"type": "or", "elements": ends}]
    if starts_in_reasoning:
        elements.insert(0, _message(""))
    return {"type": "sequence", "elements": elements}


def free_answer() -> Format:
    """Return any final message."""
    return _TEXT


def calls_of(tools: Sequence[Tool], strict: frozenset[str], is_parallel: bool) -> Format:
    """Return one call or more. Each is a message; the last may end with or without <|call|>."""
    tags = [
        {
            "type": "tag",
            "begin": f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
            "content": arguments_of(tool, tool.name in strict),
            "end": "",
        }
        for tool in tools
    ]
    calls: Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "<|call|><|start|>assistant",
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    return {"type": "sequence", "elements": [calls, {"type": "or", "elements": [_const(""), _const("<|call|>")]}]}


def _message(begin: str) -> Format:
    return {"type": "tag", "begin": begin, "content": _TEXT, "end": _NEXT}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}
