"""MessageReader: the base of the readers of all formats: plain text up to a marker, and possible calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from quire.text.parsing.bare_calls import read_bare_call
from quire.text.parsing.call_draft import CallDraft, EventSink, MakeCallId
from quire.text.parsing.formats import BareObject, Body, JsonObject, KeyedValues, NameAsKey, NamedJson, Pythonic
from quire.text.parsing.json_calls import read_name_as_key, read_named_call, read_object_call
from quire.text.parsing.keyed_calls import read_keyed_call
from quire.text.parsing.marker_scan import MarkerScan
from quire.text.parsing.pythonic_calls import read_pythonic_call
from quire.text.parsing.reader import MAX_HEADER_CHARACTERS, OutputEndError, Reader, RefusedError, Steps
from quire.text.parsing.special_tokens import SpecialTokenGate
from quire.text.parsing.tools import Tool

MAX_HELD_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """The options of a reader other than its format; see OutputParser."""

    gate: SpecialTokenGate
    tools: Mapping[str, Tool]
    make_call_id: MakeCallId
    starts_in_reasoning: bool
    starts_in_call: bool
    parallel_tool_calls: bool


class MessageReader(ABC):
    """Reads one message; `steps` is a generator to resume whenever there is more text.

    is_in_reasoning  whether the next text is reasoning, as far as known
    spaces           white space that is held until the next text is known
    is_complete      the rest of the output will be dropped, since only one call is allowed and it is complete
    plain_triggers   text without a match of this needs no parsing at present; None: all text must be parsed
    """

    def __init__(self, options: MessageOptions) -> None:
        self.reader = Reader()
        self.options = options
        self.sink = EventSink(options.gate.restore)
        self.is_in_reasoning = options.starts_in_reasoning
        self.is_complete = False
        self.spaces: list[str] = []
        self.plain_triggers: re.Pattern[str] | None = None

    def steps(self) -> Steps[None]:
        """Read the whole message, waiting for text if there is none."""
        try:
            while not self.is_complete:
                yield from self.read_part()
            while True:
                self.reader.take(len(self.reader.text))
                yield from self.reader.wait()
        except OutputEndError:
            return

    @abstractmethod
    def read_part(self) -> Steps[None]:
        """Read a part of the message. Raises OutputEndError at its end."""

    def write(self, text: str) -> None:
        """Add text to the reasoning or the content, by the reader's state."""
        self.sink.write(text, self.is_in_reasoning)

    def read_text(self, scan: MarkerScan) -> Steps[str]:
        """Write plain text up to the next marker, read that and return it. Raises OutputEndError without one."""
        reader = self.reader
        while True:
            text, start = reader.text, reader.position
            found = scan.find(text, start)
            if found is not None:
                self.write(reader.take(found.start()))
                return reader.take(found.end())
            self.write(reader.take(len(text) if reader.is_closed else scan.sure_end(text, start)))
            self.plain_triggers = scan.triggers if reader.position == len(text) else None
            yield from reader.wait()
            self.plain_triggers = None

    def new_draft(self, own_ids: bool) -> CallDraft:
        """Return a draft whose acceptance begins a call. own_ids: the model's id is the call's."""

        def accept(name: str, own_id: str | None) -> None:
            self.drop_space()
            self.is_in_reasoning = False
            call_id = self.options.gate.restore(own_id) if own_id and own_ids else None
            self.sink.start_call(call_id or self.options.make_call_id(name, self.sink.num_calls), name)

        return CallDraft(self.reader, self.sink, self.options.tools, accept, self.options.gate.restore)

    def drop_space(self) -> None:
        """Drop the white space that was held before a call."""
        self.spaces.clear()

    def end_call(self) -> None:
        """End an accepted call, even if its text is incomplete."""
        self.sink.end_call()
        self.is_complete = not self.options.parallel_tool_calls


def read_body(draft: CallDraft, body: Body) -> Steps[None]:
    """Read a call in the given format. Raises RefusedError if it is not one."""
    if isinstance(body, JsonObject):
        yield from read_object_call(draft, body)
    elif isinstance(body, NameAsKey):
        yield from read_name_as_key(draft)
    elif isinstance(body, NamedJson):
        yield from read_named_call(draft, body)
    elif isinstance(body, KeyedValues):
        yield from read_keyed_call(draft, body)
    elif isinstance(body, BareObject):
        yield from read_bare_call(draft, body)
    elif isinstance(body, Pythonic):
        yield from read_pythonic_call(draft, has_list=body.has_list)
    else:
        raise RefusedError


def held_limit(body: Body) -> int:
    """Return how many characters of a call may be held before its name is known."""
    has_early_arguments = isinstance(body, JsonObject) or (isinstance(body, NamedJson) and body.has_list)
    return MAX_HELD_CHARACTERS if has_early_arguments else 2 * MAX_HEADER_CHARACTERS
