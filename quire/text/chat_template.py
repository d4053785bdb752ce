"""ChatTemplate: a conversation rendered by the Jinja template of a checkpoint, which is not trusted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quire.base.errors import ModelFormatError, RequestError, WorkerError
from quire.base.sandbox import Sandbox, SandboxClosedError, SandboxLimitError, SandboxLostError
from quire.base.sandbox_server import SandboxServerError
from quire.text.template_hiding import RenderedChat, SpellingHider
from quire.text.template_shape import TemplateShape

MAX_SOURCE_CHARACTERS = 1_000_000
SANDBOX_COMMAND = (sys.executable, "-P", "-m", "quire.text.template_main")
_MAX_CPU_S = 10.0
_MEMORY_BYTES = 1 << 30
_NUM_TRIES = 3


@cache
def shared_sandbox() -> Sandbox:
    """Return the sandbox of all chat templates of this process; its processes start with the first template and end with the
    sandbox."""
    return Sandbox(SANDBOX_COMMAND, max_cpu_s=_MAX_CPU_S, max_wall_s=60.0, memory_bytes=_MEMORY_BYTES)


class ChatTemplate:
    """A chat template, compiled at its first use. Thread-safe.

    special_tokens  variables that the template sees, "bos_token" -> "<s>" and so on
    file            where the template is, for error messages
    sandbox         runs `template_main`; None: the shared one
    The template runs in another process: it reaches no files and no Python internals, and its time and memory are limited.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], file: Path | None = None, sandbox: Sandbox | None = None
    ) -> None:
        self.source = source
        self._file = file
        self._sandbox = sandbox
        self._special_tokens = dict(special_tokens)
        self._shape = TemplateShape(self._render_probe)

    def variables(self) -> frozenset[str]:
        """Return the names of the variables that have an effect. Raises ModelFormatError if the template is damaged."""
        return frozenset(self._ask(None)["names"])

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation.

        Raises RequestError if the messages are invalid, or the template refuses them or exceeds its limits, and
        ModelFormatError if the template itself is damaged.
        """
        return self.render_hiding((), messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs).text

    def render_hiding(
        self,
        spellings: Iterable[str],
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> RenderedChat:
        """Return the text of a conversation, and the positions of text in it that looks like special tokens but came from
        messages or tools.

        Raises as `render` does.
        """
        hider = SpellingHider(spellings)
        try:
            hidden_messages, hidden_tools = hider.hide(
                _check_messages(messages), None if tools is None else _check_tools(tools)
            )
            variables = {
                **self._special_tokens,
                **_as_plain(kwargs),
                "messages": self._shape.adapt(hidden_messages),
                "tools": hidden_tools,
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError:
            raise RequestError("messages are nested too deeply", "messages") from None
        return hider.show(self._ask(variables)["text"])

    def _render_probe(self, messages: list[dict[str, Any]]) -> str:
        variables = {**self._special_tokens, "messages": messages, "tools": None, "add_generation_prompt": False}
        return self._ask(variables)["text"]

    def _ask(self, variables: dict[str, Any] | None) -> dict[str, Any]:
        """Return the answer of template_main.

        Raises ModelFormatError if the template is damaged, and RequestError if it fails, refuses or exceeds its limits.
        """
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise self._damaged(f"chat_template must have at most {MAX_SOURCE_CHARACTERS} characters, got {len(self.source)}")
        answer = self._answer({"source": self.source, "variables": variables})
        error = answer.get("error")
        if error is None:
            return answer
        if answer["kind"] == "format":
            raise self._damaged(error)
        if answer["kind"] == "refused":
            raise RequestError(f"the chat template refuses these messages: {error}", "messages")
        raise RequestError(f"chat_template failed: {error}", "chat_template")

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the sandbox, and retry if its process ended for reasons other than the template. Raises WorkerError if no process
        starts."""
        sandbox = self._sandbox or shared_sandbox()
        for num_left in reversed(range(_NUM_TRIES)):
            try:
                with sandbox.ask({}, message) as answer:
                    return answer
            except SandboxLimitError:
                raise RequestError(
                    f"chat_template failed: it takes more than {sandbox.max_cpu_s:g} s or the memory that is allowed",
                    "chat_template",
                ) from None
            except ValueError as error:  # of an integer that is too long to convert
                raise RequestError(f"chat_template failed: {error}", "chat_template") from None
            except (SandboxServerError, SandboxLostError) as error:
                if not num_left:
                    raise WorkerError(f"the process that renders chat templates does not work: {error}") from None
            except SandboxClosedError:
                raise WorkerError("the process that renders chat templates has been ended") from None
        raise AssertionError

    def _damaged(self, message: str) -> ModelFormatError:
        return ModelFormatError(message if self._file is None else f"{self._file}: {message}")


def _check_messages(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {_shorten(messages)}", "messages")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    """Return a message in the form that templates expect: content a string, the arguments of tool calls an object."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object, got {_shorten(message)}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"messages[{index}].role must be a non-empty string, got {_shorten(role)}", "messages")
    checked = {name: _as_plain(value) for name, value in message.items()}
    checked["content"] = _join_content(index, message.get("content"))
    calls = checked.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RequestError(f"messages[{index}].tool_calls must be a list of objects, got {_shorten(calls)}", "messages")
    for call in calls or []:
        for holder in (call, call.get("function")):
            if isinstance(holder, dict) and isinstance(holder.get("arguments"), str):
                holder["arguments"] = _parse_arguments(holder["arguments"])
    return checked


def _join_content(index: int, content: object) -> str:
    """Return the text of a message: "" for None, the text parts of a list joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"messages[{index}].content must be a string, null or a list of text parts, got {_shorten(content)}", "messages"
        )
    texts: list[str] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type", "text") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            raise RequestError(
                f"messages[{index}].content may only have text parts, {{'type': 'text', 'text': ...}}, got {_shorten(part)}",
                "messages",
            )
        texts.append(part)
    return "\n".join(texts)


def _parse_arguments(arguments: str) -> object:
    """Return the arguments of a tool call as an object if they are a JSON object: templates print objects themselves."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _check_tools(tools: object) -> list[Any] | None:
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
    if not is_list or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(f"tools must be a list of objects, got {_shorten(tools)}", "tools")
    return _as_plain(tools) or None


def _as_plain(value: Any) -> Any:
    """Rebuild a value from JSON's types, so that a template gets no objects with other methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {str(_as_plain(key)): _as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
