"""MarkedMessage: parses messages whose calls and reasoning are between markers."""

from __future__ import annotations

import re

from quire.base.errors import InvariantError
from quire.text.parsing.call_draft import CallDraft
from quire.text.parsing.formats import JsonObject, KeyedValues, NamedJson, ReasoningFormat, ToolFormat, map_markers
from quire.text.parsing.marker_scan import MarkerScan
from quire.text.parsing.message_reader import MessageOptions, MessageReader, held_limit, read_body
from quire.text.parsing.reader import RefusedError, Steps

_SPACE = re.compile(r"[ \t\r\n]*")


class MarkedMessage(MessageReader):
    """Content, reasoning and calls.

    Markers around an answer are dropped: an opening marker only at the beginning, a closing one only after that.
    White space at the beginning, after reasoning and after a call is held until text follows, and dropped if a call or
    nothing follows. A call inside of reasoning ends the reasoning; the closing marker of reasoning is plain text in content.
    """

    def __init__(self, tools: ToolFormat | None, reasoning: ReasoningFormat | None, options: MessageOptions) -> None:
        super().__init__(options)
        gate = options.gate
        self._format = None if tools is None else map_markers(tools, gate.lenient)
        self._sections = () if tools is None else gate.strict(tools.sections)
        calls = () if tools is None else (*gate.strict(tools.openers), *self._sections)
        self._opens = () if reasoning is None else gate.strict(reasoning.opens)
        closes = () if reasoning is None else gate.strict(reasoning.closes)
        self._trims = reasoning is not None and reasoning.trims_newlines
        self._closes = (*closes, *(f"\n{marker}" for marker in closes)) if self._trims else closes
        self._content_opens = () if reasoning is None else gate.strict(reasoning.content_opens)
        content_closes = () if reasoning is None else gate.strict(reasoning.content_closes)
        self._content_closes = (*content_closes, *(f"\n{marker}" for marker in content_closes if self._trims))
        sure_opens = () if reasoning is None else tuple(set(self._opens) - set(reasoning.opens))
        self._content_scan = MarkerScan((*calls, *sure_opens, *self._content_closes))
        self._reasoning_scan = MarkerScan((*calls, *self._closes))
        self._calls = calls
        self._is_fresh = bool(calls or self._opens)
        self._is_in_content = False
        self._is_after_call = False
        self._may_repeat_call = False
        self._is_in_list = False
        self._has_content = False
        self._may_repeat_open = options.starts_in_reasoning
        self._starts_in_call = options.starts_in_call and tools is not None

    def read_part(self) -> Steps[None]:
        """Read up to the end of reasoning, of a call, or of a text that looked like a call."""
        if self._starts_in_call:
            self._starts_in_call = False
            yield from self._follow("")
        elif self.is_in_reasoning:
            yield from self._read_reasoning()
        elif self._is_fresh:
            yield from self._read_beginning()
        else:
            marker = yield from self.read_text(self._content_scan)
            yield from self._follow(marker)

    def write(self, text: str) -> None:
        """Add text, preceded by held white space if it is content."""
        if text and not self.is_in_reasoning:
            self._leave_beginning()
            self._has_content = True
            text = "".join([*self.spaces, text])
            self.spaces.clear()
        super().write(text)

    def _leave_beginning(self) -> None:
        self._is_fresh = self._is_after_call = self._is_in_list = self._may_repeat_call = False

    def _read_reasoning(self) -> Steps[None]:
        if self._may_repeat_open:
            self._may_repeat_open = False
            if (yield from self.reader.match(self._opens)) is not None:
                yield from self._begin_reasoning()
        marker = yield from self.read_text(self._reasoning_scan)
        if marker not in self._closes:
            yield from self._read_call(marker)
            return
        self.is_in_reasoning = False
        self._is_fresh = bool(self._calls or self._content_opens)
        for _ in range(2 if self._trims else 0):
            yield from self.reader.match(("\n",))

    def _begin_reasoning(self) -> Steps[None]:
        self.spaces.clear()
        self.is_in_reasoning = True
        if self._trims:
            yield from self.reader.match(("\n",))

    def _read_beginning(self) -> Steps[None]:
        """Read the text before content: white space, markers after a call, and the beginning of a call or reasoning."""
        yield from self._hold_space()
        row, reader = self._format, self.reader
        after = () if row is None or not self._is_after_call else (*row.trailers, *(("]",) if self._is_in_list else ()))
        separators = () if row is None or not self._is_after_call else row.separators
        separators = (*separators, ",") if self._is_in_list else separators
        starts = () if row is None or self._has_content else row.starts
        opens = () if self.sink.has_text or self.sink.num_calls else self._opens
        markers = tuple(
            dict.fromkeys((*after, *separators, *starts, *self._content_scan.markers, *opens, *self._content_opens))
        )
        marker = yield from reader.match(markers)
        if marker is None and self._may_repeat_call and not self._is_over(after):
            yield from self._read_call("", is_continued=True)
        elif marker is None:
            fences = row.body.closing_fences if row is not None and isinstance(row.body, NamedJson) else ()
            self._write_rest((*after, *(fences if self._is_after_call else ())))
        elif marker in after:
            self.spaces.clear()
            self._is_in_list = self._is_in_list and marker != "]"
            self._may_repeat_call = self._may_repeat_call and marker == "]"
        elif marker in separators:
            yield from self._read_call(marker, is_continued=True)
        elif marker in starts and marker not in self._content_scan.markers:
            reader.position -= len(marker)
            yield from self._read_call("")
        else:
            yield from self._follow(marker)

    def _write_rest(self, trailers: tuple[str, ...]) -> None:
        """Write the held white space before content, or at the end the incomplete marker."""
        reader = self.reader
        if self._is_over(trailers):
            reader.take(len(reader.text))
            if self.sink.has_text or self.sink.num_calls:
                self.spaces.clear()
        self._leave_beginning()
        spaces = "".join(self.spaces)
        self.spaces.clear()
        self.write(spaces)

    def _is_over(self, trailers: tuple[str, ...]) -> bool:
        """Whether the output ends here, or inside a trailer."""
        reader = self.reader
        rest = reader.text[reader.position :] if reader.is_closed else ""
        return reader.is_closed and (not rest or any(trailer.startswith(rest) for trailer in trailers))

    def _follow(self, marker: str) -> Steps[None]:
        if marker in self._opens:
            yield from self._begin_reasoning()
        elif marker in self._content_opens:
            self.spaces.clear()
            self._is_in_content = True
            if self._trims:
                yield from self.reader.match(("\n",))
        elif marker in self._content_closes and self._is_in_content:
            self.spaces.clear()
            self._is_in_content = False
            self._is_fresh = True
        elif marker in self._content_closes:
            self.write(marker)
        else:
            yield from self._read_call(marker)

    def _read_call(self, marker: str, is_continued: bool = False) -> Steps[None]:
        """Read a call after its first marker, or write the marker as text if no call follows."""
        reader, row = self.reader, self._format
        if row is None:
            raise InvariantError(f"a marker of tool calls was found, {marker!r}, and tool calls are not looked for")
        reader.mark(len(marker), held_limit(row.body))
        if row.content_names and (yield from reader.match(row.content_names)) is not None:
            reader.unmark()
            self._leave_beginning()
            return
        draft = self.new_draft(row.call_ids != "random")
        draft.is_in_list = is_continued and self._is_in_list
        try:
            yield from self._read_marked(draft, marker, row)
        except RefusedError as error:
            if not draft.is_accepted:
                self.write(reader.go_back(max(len(marker), 1), error))
                return
        self.end_call()
        self._is_fresh = self._is_after_call = True
        self._may_repeat_call = row.repeats
        self._has_content = False
        self._is_in_list = draft.is_in_list

    def _read_marked(self, draft: CallDraft, marker: str, row: ToolFormat) -> Steps[None]:
        reader = self.reader
        if marker in self._sections:
            found = yield from reader.match(row.openers, skips_space=True)
            if found is None:
                raise RefusedError
            marker = found
        if isinstance(row.body, KeyedValues) and marker in row.body.name_opens:
            reader.position -= len(marker)
        yield from read_body(draft, JsonObject() if draft.is_in_list and isinstance(row.body, NamedJson) else row.body)

    def _hold_space(self) -> Steps[None]:
        reader = self.reader
        while True:
            found = _SPACE.match(reader.text, reader.position)
            self.spaces.append(reader.take(reader.position if found is None else found.end()))
            if reader.position < len(reader.text) or reader.is_closed:
                return
            yield from reader.wait()
