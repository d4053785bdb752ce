"""TemplateShape: detects the form of messages that a chat template expects, by rendering small conversations, and adapts
messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

from quire.base.errors import RequestError

_PROBE, _SECOND = "QuireProbe", "QuireSecond"
_USER = {"role": "user", "content": "Hi"}
_ALWAYS_SHOWN = frozenset(("user", "assistant"))

Message = dict[str, Any]


class TemplateShape:
    """The behaviour of one template; each property is detected once, at its first use.

    render  renders messages, and raises RequestError
    """

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render
        self._shows_role: dict[str, bool] = {}

    def adapt(self, messages: list[Message]) -> list[Message]:
        """Return messages in the form that the template expects; content is a string, arguments are objects.

        Raises RequestError for a message that the template would silently omit.
        """
        if any(message["role"] == "developer" for message in messages) and not self._shows("developer"):
            messages = [{**message, "role": _system_for(message["role"])} for message in messages]
        if sum(message["role"] == "system" for message in messages) > 1 and self._merges_systems:
            messages = _merge_systems(messages)
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in _ALWAYS_SHOWN and message["content"] and not self._shows(role):
                raise RequestError(
                    f"messages[{index}] has the role {role!r}, which the chat template of this model leaves out: send its "
                    "content as a user message",
                    "messages",
                )
        if any(message.get("tool_calls") for message in messages) and self._wants_text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        if self._wants_parts:
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        return messages

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether content is omitted as a string but shown as a list of parts."""
        part = {"type": "text", "text": _PROBE}
        as_text = self._try([{"role": "user", "content": _PROBE}])
        return not _has(as_text, _PROBE) and _has(self._try([{"role": "user", "content": [part]}]), _PROBE)

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the arguments of a call must be JSON text: an object fails, or is printed as a Python literal."""
        as_object = self._try(_call_with({"probe": _PROBE}))
        as_text = self._try(_call_with(json.dumps({"probe": _PROBE})))
        is_shown_well = as_object is not None and _PROBE in as_object and "'probe'" not in as_object
        return not is_shown_well and _has(as_text, _PROBE)

    @cached_property
    def _merges_systems(self) -> bool:
        """Whether only one system message, at the start, is shown."""
        first, second = ({"role": "system", "content": text} for text in (_PROBE, _SECOND))
        answer = {"role": "assistant", "content": "Hi"}
        if not _has(self._try([first, _USER]), _PROBE):
            return False
        texts = [self._try([first, second, _USER]), self._try([first, _USER, answer, second, _USER])]
        return not all(_has(text, _PROBE) and _has(text, _SECOND) for text in texts)

    def _shows(self, role: str) -> bool:
        """Whether messages of a role are shown, or refused with an error, at every position; True if unknown."""
        found = self._shows_role.get(role)
        if found is None:
            found = self._shows_role[role] = self._find_shown(role)
        return found

    def _find_shown(self, role: str) -> bool:
        message: Message = {"role": role, "content": self._wrap(_PROBE)}
        if role in ("tool", "function"):
            message |= {"tool_call_id": "abcdefghi", "name": "probe"}
            arguments = '{"a": 1}' if self._wants_text_arguments else {"a": 1}
            conversations = [[*_call_with(arguments)[:2], message]]
        else:
            conversations = [[message, _USER], [_USER, {"role": "assistant", "content": self._wrap("Hi")}, message]]
        if not _has(self._try([{"role": "user", "content": self._wrap(_PROBE)}]), _PROBE):
            return True
        texts = [self._try(conversation) for conversation in conversations]
        if role == "developer":
            return any(_has(text, _PROBE) for text in texts)
        return any(text is None or _PROBE in text for text in texts)

    def _wrap(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self._wants_parts else text

    def _try(self, messages: list[Message]) -> str | None:
        """Return the text of messages, or None if the template refuses them."""
        try:
            return self._render(messages)
        except RequestError:
            return None


def _has(text: str | None, part: str) -> bool:
    return text is not None and part in text


def _system_for(role: str) -> str:
    return "system" if role == "developer" else role


def _call_with(arguments: object) -> list[Message]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "abcdefghi", "name": "probe"},
    ]


def _merge_systems(messages: list[Message]) -> list[Message]:
    """Return messages with all system messages merged into one, at the start."""
    systems = [message for message in messages if message["role"] == "system"]
    content = "\n\n".join(message["content"] for message in systems if message["content"])
    return [{**systems[0], "content": content}, *(message for message in messages if message["role"] != "system")]


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_call_as_text(call) for call in calls]}


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    changed = dict(call)
    if isinstance(call.get("function"), dict):
        changed["function"] = _call_as_text(call["function"])
    if isinstance(call.get("arguments"), dict | list):
        changed["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return changed
