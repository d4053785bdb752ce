"""show_tools: tools, calls and results as plain messages, for models whose chat template shows no tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from quire.serving.core.plan import ChatInput

_NO_SYSTEM = re.compile(r"system role (is )?not supported", re.IGNORECASE)
_HEAD = """You can call functions. Each line between <tools> and </tools> describes one, with a JSON schema of its arguments.
<tools>
{tools}
</tools>
To call a function, write this, with the name of the function and its arguments as a JSON object:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
"""
_MANY = "To call several functions, write one such block after the other. "
_ONE = "Write only one such block. "
_AUTO = "If no function is needed, answer without a block. "
_FORCED = "You have to call {names} now. "
_RESULTS = "The results come in the next message, between <tool_response> and </tool_response>."


def show_tools(messages: Sequence[Mapping[str, Any]], chat: ChatInput, template_source: str) -> list[dict[str, Any]]:
    """Return messages of the roles system, user and assistant only, with content that is text wherever it was changed.

    The first one explains the tools. Calls become text of the assistant, results text of the user, as the explanation says.
    """
    shown: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        role = message["role"]
        if role == "tool":
            _add(shown, "user", f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>")
        elif role == "user" and follows_result:
            _add(shown, "user", _text(message.get("content")))  # many templates want user and assistant to alternate
        elif role == "assistant" and message.get("tool_calls"):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            parts = [_text(message.get("content")), *(_call(call["function"]) for call in message["tool_calls"])]
            shown.append({**rest, "content": "\n".join(filter(None, parts))})
        else:
            shown.append(dict(message))
        follows_result = role == "tool"
    return _with_explanation(shown, _explanation(chat), template_source) if chat.tools else shown


def _add(shown: list[dict[str, Any]], role: str, text: str) -> None:
    if shown and shown[-1]["role"] == role:
        shown[-1] = {**shown[-1], "content": f"{_text(shown[-1].get('content'))}\n{text}"}
    else:
        shown.append({"role": role, "content": text})


def _with_explanation(shown: list[dict[str, Any]], text: str, template_source: str) -> list[dict[str, Any]]:
    """Return the messages with the explanation in the system message, or in the first one of the user if there is none."""
    takes_system = "system" in template_source and _NO_SYSTEM.search(template_source) is None
    if shown and shown[0]["role"] in (("system", "developer") if takes_system else ("user",)):
        first = _text(shown[0].get("content"))
        both = f"{first}\n\n{text}" if takes_system else f"{text}\n\n{first}"
        return [{**shown[0], "content": both}, *shown[1:]]
    return [{"role": "system" if takes_system else "user", "content": text}, *shown]


def _explanation(chat: ChatInput) -> str:
    tools = "\n".join(_json(tool["function"]) for tool in chat.tools or ())
    choice = _FORCED.format(names=" or ".join(chat.forced_tools)) if chat.forced_tools else _AUTO
    return _HEAD.format(tools=tools) + (_MANY if chat.parallel_tool_calls else _ONE) + choice + _RESULTS


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return f'<tool_call>\n{_json({"name": function["name"]})[:-1]}, "arguments": {arguments}}}\n</tool_call>'
    return f"<tool_call>\n{_json({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in cast("list[dict[str, str]]", content))
    return content if isinstance(content, str) else ""
