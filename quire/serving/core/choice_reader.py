"""ChoiceReader: turns the deltas of one choice into events, with the parser of the model's output if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.serving.core.alignment import TokenAligner, TokenText
from quire.serving.core.events import (
    ChoiceEnd,
    GenerationEvent,
    Position,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from quire.serving.core.plan import GenerationPlan
from quire.serving.engine_client.messages import ChoiceDelta
from quire.text.parsing.events import CallArguments, CallEnd, CallStart, ParserEvent, ReasoningPiece, TextPiece
from quire.text.parsing.parser import OutputParser


class ChoiceReader:
    """Reads one choice of a plan. Events are appended to the list that the caller passes.

    has_ended      a ChoiceEnd was made; later deltas are ignored
    num_reasoning  tokens that were reasoning
    """

    def __init__(self, plan: GenerationPlan, choice: int) -> None:
        params = plan.request.params
        self._choice = choice
        self._plan = plan
        self._parser = _make_parser(plan)
        self._ending = plan.request.ending_token_ids
        self._aligner: TokenAligner | None = None
        if plan.tokenizer is not None and (plan.has_positions or self._parser is not None):
            self._aligner = TokenAligner(
                plan.tokenizer,
                params.skip_special_tokens,
                plan.request.prompt_token_ids,
                is_exact=params.constraint is not None,
            )
        self._visible = VisiblePositions() if plan.has_positions and self._parser is not None else None
        self._hidden = frozenset[int]()
        if plan.tokenizer is not None and plan.parser is not None and plan.hides_special_tokens:
            self._hidden = plan.tokenizer.special_token_ids - frozenset(plan.parser.marker_token_ids.values())
        self._reads_token_by_token = self._visible is not None or (
            plan.parser is not None and plan.parser.reasoning_format is not None
        )
        self._num_calls = 0
        self.num_reasoning = 0
        self.has_ended = False

    @property
    def is_plain(self) -> bool:
        """Whether all text is answer, without token positions."""
        return self._parser is None and self._aligner is None

    def feed(self, delta: ChoiceDelta, events: list[GenerationEvent]) -> None:
        """Read a delta, the last one of the choice if it has a finish_reason."""
        if self.has_ended:
            return
        if self._aligner is None:
            if delta.text:
                events.append(TextDelta(self._choice, delta.text))
        else:
            self._read(self._aligned(self._aligner, delta), events)
        if delta.finish_reason is None and not (self._parser is not None and self._parser.is_complete):
            return
        self._end(delta, events)

    def _aligned(self, aligner: TokenAligner, delta: ChoiceDelta) -> list[TokenText]:
        token_ids, positions = delta.token_ids, delta.logprobs
        if delta.finish_reason is None:
            return aligner.feed(delta.text, token_ids, positions)
        is_cut = isinstance(delta.stop_reason, str)
        is_by_token = delta.finish_reason == "stop" and not is_cut and bool(token_ids) and token_ids[-1] in self._ending
        if is_by_token and not self._plan.request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # a stop token is not part of the text; the last token of a complete constraint is
        pieces = aligner.feed("", token_ids, positions)
        return pieces + aligner.finish(delta.text, is_cut)

    def _read(self, pieces: Sequence[TokenText], events: list[GenerationEvent]) -> None:
        parser = self._parser
        if parser is None:
            text = "".join([piece.text for piece in pieces])
            found = [piece.position for piece in pieces if piece.position is not None and self._is_shown(piece)]
            self._write(text, found, events)
            return
        if len(pieces) == 1 or self._reads_token_by_token:
            for piece in pieces:
                self._parse(parser, piece, events)
            return
        shown = [piece.text for piece in pieces if piece.token_id not in self._hidden]
        token_ids = [piece.token_id for piece in pieces if piece.token_id is not None]
        self._take(parser.feed("".join(shown), token_ids), events)

    def _is_shown(self, piece: TokenText) -> bool:
        """Whether a token is part of the text: special tokens that are left out of the text have no positions either."""
        tokenizer = self._plan.tokenizer
        is_left_out = tokenizer is not None and self._plan.request.params.skip_special_tokens
        return not (is_left_out and tokenizer is not None and piece.token_id in tokenizer.special_token_ids)

    def _parse(self, parser: OutputParser, piece: TokenText, events: list[GenerationEvent]) -> None:
        text, token_id, position = piece
        if token_id in self._hidden:
            text, position = "", None
        if self._visible is not None:
            self._visible.add(text, position)
        was_reasoning = parser.is_in_reasoning
        self._take(parser.feed(text, () if token_id is None else (token_id,)), events)
        if token_id is not None and (was_reasoning or parser.is_in_reasoning):
            self.num_reasoning += 1

    def _take(self, found: list[ParserEvent], events: list[GenerationEvent]) -> None:
        choice, visible = self._choice, self._visible
        for event in found:
            if isinstance(event, TextPiece):
                self._write(event.text, [] if visible is None else visible.take(event.text), events)
            elif isinstance(event, ReasoningPiece):
                if visible is not None:
                    visible.drop(event.text)
                if self._plan.shows_reasoning:
                    self._reason(event.text, events)
            else:
                if visible is not None:
                    visible.drop_all_but_last()
                if isinstance(event, CallArguments):
                    self._argue(event, events)
                elif isinstance(event, CallStart):
                    self._num_calls += 1
                    events.append(ToolCallStart(choice, event.index, event.call_id, event.name))
                elif isinstance(event, CallEnd):
                    events.append(ToolCallEnd(choice, event.index))

    def _write(self, text: str, positions: list[Position], events: list[GenerationEvent]) -> None:
        if not text and not positions:
            return
        last = events[-1] if events else None
        if isinstance(last, TextDelta) and last.choice == self._choice:
            last.text += text
            if last.positions is not None:
                last.positions += positions
            return
        events.append(TextDelta(self._choice, text, positions if self._plan.has_positions else None))

    def _reason(self, text: str, events: list[GenerationEvent]) -> None:
        last = events[-1] if events else None
        if isinstance(last, ReasoningDelta) and last.choice == self._choice:
            last.text += text
        else:
            events.append(ReasoningDelta(self._choice, text))

    def _argue(self, piece: CallArguments, events: list[GenerationEvent]) -> None:
        last = events[-1] if events else None
        if isinstance(last, ToolCallArguments) and last.choice == self._choice and last.index == piece.index:
            last.text += piece.text
        else:
            events.append(ToolCallArguments(self._choice, piece.index, piece.text))

    def _end(self, delta: ChoiceDelta, events: list[GenerationEvent]) -> None:
        setup = self._plan.parser
        is_length = delta.finish_reason == "length"
        if self._parser is not None:
            found = self._parser.finish()
            if is_length and setup is not None and setup.has_calls_alone:
                found = [event for event in found if not isinstance(event, TextPiece)]  # the beginning of a call
            self._take(found, events)
        self.has_ended = True
        if setup is not None and setup.tool_format is not None:
            setup.count_output("parsed" if self._num_calls else "none")
        reason = "length" if is_length else "tool_calls" if self._num_calls else "stop"
        events.append(ChoiceEnd(self._choice, reason, delta.stop_reason))


def _make_parser(plan: GenerationPlan) -> OutputParser | None:
    setup = plan.parser
    if setup is None:
        return None
    return OutputParser(
        tool_format=setup.tool_format,
        reasoning_format=setup.reasoning_format,
        tools=setup.tools,
        starts_in_reasoning=setup.starts_in_reasoning,
        starts_in_call=setup.starts_in_call,
        parallel_tool_calls=setup.parallel_tool_calls,
        marker_token_ids=setup.marker_token_ids,
    )


class VisiblePositions:
    """Holds what is known of the tokens whose text a parser has taken in and not yet given out.

    What the parser gives out is in order what it took in, less the markers between. A token on the border of two
    parts goes with the first of them that is visible.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, Position | None]] = []

    def add(self, text: str, position: Position | None) -> None:
        """Take in one token and its text."""
        if text or position is not None:
            self._held.append((text, position))

    def take(self, text: str) -> list[Position]:
        """Return what is known of the tokens of a visible part of the text; what was before it is dropped."""
        return self._consume(text)

    def drop(self, text: str) -> None:
        """Drop the tokens of a part of the text that is not visible, and what was before it."""
        self._consume(text)

    def drop_all_but_last(self) -> None:
        """Drop all but the last token, the end of whose text may be visible."""
        del self._held[:-1]

    def _consume(self, text: str) -> list[Position]:
        """Remove what is held up to the end of `text` in it; return what is known of the tokens that overlap it."""
        joined = "".join([held for held, _ in self._held])
        start = max(joined.find(text), 0)
        end = start + len(text)
        found: list[Position] = []
        textless: list[Position | None] = []  # beginnings of characters: they go with the token that completes them
        at = 0
        for index, (held, position) in enumerate(self._held):
            begin, at = at, at + len(held)
            if begin >= end:
                self._held = self._held[index:]
                return found
            if not held:
                textless.append(position)
                continue
            if at > start:
                found += [known for known in (*textless, position) if known is not None]
            textless = []
            if at > end:
                self._held = [(held[end - begin :], None), *self._held[index + 1 :]]
                return found
        self._held = [("", position) for position in textless]
        return found
