"""Items of the Responses API: elements of a conversation, as they are sent, stored and returned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.api.decode import BodyError
from quire.api.openai.answers import ChatLogprob
from quire.api.openai.chat import MAX_MESSAGES, MAX_PARTS, CallName

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Meta(max_length=256)]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text of an input message."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Generated text."""

    text: str
    annotations: list[None] = []
    logprobs: list[ChatLogprob] = []


class SentOutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of an earlier response. Its annotations and log probabilities are ignored."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalText(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal of an earlier response; the model sees it as text."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A summary of reasoning from another server."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A generated message."""

    id: str
    role: str
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Generated reasoning, in full; summaries are not generated."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    status: ItemStatus


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function call; arguments is JSON as a string."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; input is free text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall

SentPart = InputText | SentOutputText | RefusalText | ReasoningText
SentParts = Annotated[list[SentPart], Meta(max_length=MAX_PARTS)]
SentTexts = str | SentParts


class InputItem(msgspec.Struct, kw_only=True):
    """One item of the input; its type determines which fields it has.

    message                  role, content
    function_call            call_id, name, arguments: a call of an earlier response
    function_call_output     call_id, output: the function's output
    custom_tool_call         call_id, name, input: a call of an earlier response
    custom_tool_call_output  call_id, output: the tool's output
    reasoning                content, else summary: reasoning of an earlier response
    """

    id: ItemId | None = None
    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: SentTexts | None = None
    call_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    name: CallName | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[SummaryText], Meta(max_length=MAX_PARTS)] | None = None
    status: ItemStatus | None = None

    def check(self, where: str) -> None:
        """Check that the item has the fields that its type needs. Raises RequestError."""
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                param = f"{where}.{name}"
                raise BodyError(f"{param} is required", param, "missing_required_parameter")
        if self.type != "message":
            return
        wrong = _wrong_part(self.content or "", self.role == "assistant")
        if wrong is not None:
            position, kind = wrong
            param = f"{where}.content[{position}].type"
            raise BodyError(f"{param}: a message of the {self.role} cannot have {kind!r} parts", param)

    @property
    def is_call_output(self) -> bool:
        """Whether it is the output of a function or a custom tool."""
        return self.type in ("function_call_output", "custom_tool_call_output")

    @property
    def texts(self) -> list[str]:
        """The texts of a message, of reasoning, or of a function's output."""
        if self.is_call_output:
            return texts_of(self.output)
        return texts_of(self.content) or [part.text for part in self.summary or ()]


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}
InputItems = Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]


def texts_of(content: SentTexts | list[InputText] | None) -> list[str]:
    """Return the texts of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [part.refusal if isinstance(part, RefusalText) else part.text for part in content]


def _wrong_part(content: SentTexts, is_answer: bool) -> tuple[int, str] | None:
    """Return the index and type of the first part that the message's role does not allow."""
    if isinstance(content, str):
        return None
    for position, part in enumerate(content):
        kind = type(part)
        if kind is ReasoningText or (kind is not InputText and not is_answer):
            return position, str(part.__struct_config__.tag)
    return None
