"""OutputParser: incrementally splits the text of an output into content, reasoning and tool calls.

The events of an output fold to the same message however the text is split, so whole outputs need no second parser.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from quire.text.parsing.call_draft import make_random_id, make_short_id
from quire.text.parsing.detection import reads_without_tools
from quire.text.parsing.events import ParserEvent
from quire.text.parsing.formats import find_reasoning_format, find_tool_format, is_harmony, markers_of
from quire.text.parsing.harmony_message import HarmonyMessage
from quire.text.parsing.marked_message import MarkedMessage
from quire.text.parsing.message_reader import MessageOptions, MessageReader
from quire.text.parsing.special_tokens import SpecialTokenGate
from quire.text.parsing.tools import Tool

__all__ = ["OutputParser", "Tool"]


class OutputParser:
    """Parses one output. Text must be decoded with special tokens included, and without the one that ended it.

    tool_format, reasoning_format  names of the tables in formats.py; None: calls or reasoning are left in the text
    tools                the tools that may be called; calls of other names are text. Empty: all calls are left in the text
    starts_in_reasoning  whether the prompt ends in reasoning, see detection.starts_in_reasoning
    starts_in_call       likewise, see detection.starts_in_call
    parallel_tool_calls  False: the output ends after its first call; later text is dropped, see is_complete
    make_call_id         (name, index) -> id; None: a random one in the format's form. Ids that the model wrote are kept.
    marker_token_ids     markers that are special tokens -> their ids. Such a marker in the text counts only if its token
                         arrived, not if it is spelled out in prose; see formats.markers_of. Others are found in text.
    Raises ConfigError for an unknown format. Never raises for a model's output.
    """

    def __init__(
        self,
        *,
        tool_format: str | None,
        reasoning_format: str | None,
        tools: Sequence[Tool],
        starts_in_reasoning: bool,
        starts_in_call: bool = False,
        parallel_tool_calls: bool = True,
        make_call_id: Callable[[str, int], str] | None = None,
        marker_token_ids: Mapping[str, int] = {},
    ) -> None:
        tool_row, reasoning_row = find_tool_format(tool_format), find_reasoning_format(reasoning_format)
        is_read = bool(tools) or reads_without_tools(tool_format)
        tool_row = tool_row if is_read else None
        markers = markers_of(tool_format if is_read else None, reasoning_format)
        ids = {marker: marker_token_ids[marker] for marker in markers if marker in marker_token_ids}
        make_default = make_short_id if tool_row is not None and tool_row.call_ids == "short" else make_random_id
        options = MessageOptions(
            gate=SpecialTokenGate(ids),
            tools={tool.name: tool for tool in tools},
            make_call_id=make_call_id or make_default,
            starts_in_reasoning=starts_in_reasoning and reasoning_row is not None,
            starts_in_call=starts_in_call,
            parallel_tool_calls=parallel_tool_calls,
        )
        self._gate = options.gate
        self._message: MessageReader
        if is_harmony(tool_format, reasoning_format):
            self._message = HarmonyMessage(reasoning_row is not None, options)
        else:
            self._message = MarkedMessage(tool_row, reasoning_row, options)
        self._steps = self._message.steps()
        # An open generator would be closed at interpreter exit, when the modules of its exceptions are gone.
        weakref.finalize(self, self._steps.close)
        next(self._steps)

    @property
    def is_in_reasoning(self) -> bool:
        """Whether the output is in its reasoning, as far as certain."""
        return self._message.is_in_reasoning

    @property
    def is_complete(self) -> bool:
        """Whether further text will be dropped, so that generation may stop: the only allowed call is complete."""
        return self._message.is_complete

    @property
    def num_steps(self) -> int:
        """The work done, in inspected characters; it is linear in the text."""
        return self._message.reader.num_steps

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Return the events of a piece of text. token_ids are the new tokens since the last call; their text may arrive
        later."""
        message = self._message
        text = self._gate.feed(text, token_ids)
        if not text:
            return []
        triggers = message.plain_triggers
        if triggers is not None and triggers.search(text) is None:
            message.reader.num_steps += len(text)
            message.write(text)
        else:
            message.reader.feed(text)
            next(self._steps)
        return message.sink.take()

    def finish(self) -> list[ParserEvent]:
        """Return the remaining events at the end of the output. Call once."""
        reader = self._message.reader
        reader.feed(self._gate.finish())
        reader.is_closed = True
        next(self._steps, None)
        return self._message.sink.take()
