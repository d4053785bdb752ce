"""Conversation: builds the messages for chat templates from the items of an API."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class Conversation:
    """Builds messages in the form of the OpenAI API.

    Consecutive texts, reasoning and calls of the assistant are one message: its texts, then its calls.

    joins_users  consecutive texts of the user are one message too
    """

    def __init__(self, joins_users: bool = False) -> None:
        self.messages: list[Message] = []
        self._joins_users = joins_users
        self._called: dict[str, str] = {}

    def knows_call(self, call_id: str) -> bool:
        """Whether the assistant has made this call."""
        return call_id in self._called

    def say(self, role: str, texts: list[str]) -> None:
        """Add a message of a role other than the assistant."""
        parts = [{"type": "text", "text": text} for text in texts]
        if self._joins_users and role == "user" and self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += parts
            return
        self.messages.append({"role": role, "content": parts})

    def answer(self, texts: list[str]) -> None:
        """Add text of the assistant."""
        turn = self._turn()
        turn["content"] = (turn["content"] or "") + "".join(texts)

    def reason(self, text: str) -> None:
        """Add reasoning of the assistant."""
        turn = self._turn()
        turn["reasoning_content"] = turn["reasoning_content"] + "\n" + text if "reasoning_content" in turn else text

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a tool call of the assistant."""
        self._called[call_id] = name
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, texts: list[str]) -> None:
        """Add the result of a tool call."""
        content = [{"type": "text", "text": text} for text in texts]
        message: Message = {"role": "tool", "content": content, "tool_call_id": call_id}
        name = self._called.get(call_id)
        self.messages.append(message if name is None else {**message, "name": name})

    def _turn(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]
