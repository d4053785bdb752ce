"""HarmonyMessage: parses outputs of messages with a header, <|channel|>analysis<|message|>...<|end|>."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.text.parsing.formats import TOOL_FORMATS
from quire.text.parsing.json_calls import pass_value
from quire.text.parsing.marker_scan import MarkerScan
from quire.text.parsing.message_reader import MessageOptions, MessageReader
from quire.text.parsing.reader import MAX_HEADER_CHARACTERS, OutputEndError, RefusedError, Steps

_RECIPIENT = re.compile(r"to=(\S+)")
_ROLE_RECIPIENT = " to="


class HarmonyMessage(MessageReader):
    """Channel analysis is reasoning, if requested; a message to functions.NAME is a call; everything else is content.

    An incomplete header at the end of the output is dropped.
    """

    def __init__(self, has_reasoning: bool, options: MessageOptions) -> None:
        super().__init__(options)
        gate = options.gate
        self._has_reasoning = has_reasoning
        self._header_opens = gate.strict(("<|start|>", "<|channel|>"))
        self._inner_marks = gate.lenient(("<|start|>", "<|constrain|>"))
        self._channel_marks = gate.lenient(("<|channel|>",))
        self._message = gate.strict(("<|message|>",))
        self._ends = gate.strict(("<|end|>", "<|call|>", "<|return|>"))
        self._scan = MarkerScan(gate.strict(TOOL_FORMATS["openai"].openers))
        self._is_between = not options.starts_in_reasoning

    def read_part(self) -> Steps[None]:
        """Read a text up to a marker and, if a header follows, the header and its call."""
        is_between, self._is_between = self._is_between, False
        if is_between:
            options = (*self._header_opens, *(() if self.sink.has_text or self.sink.num_calls else (_ROLE_RECIPIENT,)))
            marker = yield from self.reader.match(options)
        else:
            marker = None
        marker = marker or (yield from self.read_text(self._scan))
        if marker in self._header_opens or marker == _ROLE_RECIPIENT:
            yield from self._read_header(marker, is_between)
        elif marker in self._ends:
            self.is_in_reasoning = False
            self._is_between = True
        else:
            self.write(marker)

    def _read_header(self, marker: str, is_between: bool) -> Steps[None]:
        """Read a header and apply it; a call is read completely."""
        reader = self.reader
        reader.mark(len(marker), 2 * MAX_HEADER_CHARACTERS)
        draft = self.new_draft(own_ids=False)
        channel = ""
        try:
            header = marker + (yield from reader.read_until(self._message))
            channel, recipient = self._parse_header(header)
            if recipient is not None and recipient.startswith("functions."):
                draft.accept(recipient.removeprefix("functions."))
                yield from self._read_arguments(draft.write)
        except RefusedError as error:
            if not draft.is_accepted:
                kept = reader.go_back(len(marker), error)
                is_cut_off = isinstance(error, OutputEndError) and is_between and marker != _ROLE_RECIPIENT
                if is_cut_off:
                    reader.take(len(reader.text))
                else:
                    self.write(kept)
                return
        if draft.is_accepted:
            self.end_call()
            self._is_between = True
            return
        reader.unmark()
        self.is_in_reasoning = channel == "analysis" and self._has_reasoning

    def _parse_header(self, header: str) -> tuple[str, str | None]:
        """Return channel and recipient."""
        for mark in self._inner_marks:
            header = header.replace(mark, " ")
        for mark in self._channel_marks:
            header = header.replace(mark, " \n")
        found = _RECIPIENT.search(header)
        channel = header.rpartition("\n")[2].split() if "\n" in header else []
        return channel[0] if channel else "", None if found is None else found.group(1)

    def _read_arguments(self, write: Callable[[str], None]) -> Steps[None]:
        """Write the arguments of a call: JSON or, if the tool takes it, plain text up to the end of the message."""
        reader = self.reader
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from pass_value(reader, write)
            yield from reader.match(self._ends, skips_space=True)
            return
        ends = MarkerScan((*self._ends, *self._header_opens))
        while True:
            found = ends.find(reader.text, reader.position)
            is_whole = found is not None or reader.is_closed
            end = (
                found.start()
                if found is not None
                else len(reader.text)
                if is_whole
                else ends.sure_end(reader.text, reader.position)
            )
            write(reader.take(end))
            if found is not None:
                if found.group() in self._ends:
                    reader.take(found.end())
                return
            yield from reader.wait()
