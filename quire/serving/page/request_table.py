"""RequestTable: the requests of the live view, with their own numbers and labels."""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from quire.serving.metrics.request_record import RequestRecord
from quire.serving.page.wire import RequestRow, RequestState

MAX_ENDED = 256
"""The number of ended requests that are still shown."""


@dataclass(slots=True)
class _Entry:
    """version: the view's version when the row last changed. scheduled_s: the start of the first observed step with it.

    The row has the random label.
    """

    number: int
    label: str
    owner: str | None = None
    scheduled_s: float | None = None
    row: RequestRow | None = None
    version: int = 0


class RequestTable:
    """Written only by the view. Numbers are never reused; a label reveals nothing about the request's id.

    origin_s  the origin of the rows' clock, of time.monotonic()
    """

    def __init__(self, origin_s: float) -> None:
        self._origin_s = origin_s
        self._numbers = itertools.count()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def number_of(self, request_id: str) -> int:
        """Return the number of a request, assigning one at first sight."""
        return self._entry(request_id).number

    def note_step(self, request_id: str, started_s: float) -> int:
        """Record that a step includes a request; return its number."""
        entry = self._entry(request_id)
        if entry.scheduled_s is None:
            entry.scheduled_s = started_s
        return entry.number

    def update(self, record: RequestRecord, version: int) -> None:
        """Update a request from its record."""
        entry = self._entry(record.job.request.request_id)
        entry.owner = record.job.owner.name
        row = self._row(entry, record)
        if row != entry.row:
            entry.row, entry.version = row, version

    def rows(self, since_version: int, with_ids: bool) -> list[RequestRow]:
        """Return the rows that changed after a version, in order of arrival; for admins with real ids and owners."""
        changed = [(name, entry) for name, entry in self._entries.items() if entry.version > since_version]
        rows = [(name, entry.owner, entry.row) for name, entry in changed if entry.row is not None]
        if not with_ids:
            return [row for _, _, row in rows]
        return [msgspec.structs.replace(row, label=name, owner=owner) for name, owner, row in rows]

    def forget(self, live: Iterable[str]) -> None:
        """Drop requests that are gone without an observed end, and the oldest ended ones."""
        kept = set(live)
        ended = [name for name, entry in self._entries.items() if entry.row is not None and entry.row.ended_ms is not None]
        kept.update(ended[-MAX_ENDED:])
        for name in [name for name in self._entries if name not in kept]:
            del self._entries[name]

    def _entry(self, request_id: str) -> _Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = _Entry(next(self._numbers), secrets.token_hex(4))
        return entry

    def _row(self, entry: _Entry, record: RequestRecord) -> RequestRow:
        has_ended = record.ended_s is not None
        scheduled_s = None if record.engine is None else record.engine.first_scheduled_time
        scheduled_s = entry.scheduled_s if scheduled_s is None else scheduled_s
        if has_ended:
            state: RequestState = "ended"
        elif record.first_output_s is not None:
            state = "decode"
        else:
            state = "queue" if scheduled_s is None else "prefill"
        return RequestRow(
            number=entry.number,
            label=entry.label,
            priority=record.job.priority,
            state=state,
            prompt_tokens=record.num_prompt_tokens,
            output_tokens=record.num_output_tokens,
            cached_tokens=0 if record.engine is None else record.engine.num_cached_tokens,
            arrived_ms=self._ms(record.arrival_s) or 0.0,
            scheduled_ms=self._ms(scheduled_s),
            first_token_ms=self._ms(record.first_output_s),
            ended_ms=self._ms(record.ended_s),
            reason=_reason(record) if has_ended else None,
            owner=None,
        )

    def _ms(self, time_s: float | None) -> float | None:
        return None if time_s is None else round((time_s - self._origin_s) * 1000, 1)


def _reason(record: RequestRecord) -> str:
    if record.abort_reason is not None:
        return record.abort_reason
    return "error" if record.error is not None else next(iter(record.finish_reasons), "stop")
