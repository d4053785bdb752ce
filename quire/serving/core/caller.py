"""Caller: the tenant that a handler works for, and the deadline."""

from __future__ import annotations

from dataclasses import dataclass

from quire.contracts.request import Request
from quire.serving.interfaces import Job, PriorityClass, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller without HTTP: a connection or a batch.

    deadline_s   in time.monotonic(); None for none
    priority     None: the tier in the body, otherwise "default"
    traceparent  W3C trace context that the client sent
    call_id      of the HTTP request; None for none
    client_id    of the same request, as the client has named it; None for none
    received_s   arrival of the request's head, in time.monotonic(); None without HTTP
    """

    owner: Tenant
    route: str
    deadline_s: float | None = None
    priority: PriorityClass | None = None
    traceparent: str | None = None
    call_id: str | None = None
    client_id: str | None = None
    received_s: float | None = None

    def job(self, request: Request, is_streaming: bool, priority: PriorityClass = "default") -> Job:
        """Return the job of a request; `priority` is the tier in the body."""
        return Job(
            request=request,
            owner=self.owner,
            route=self.route,
            is_streaming=is_streaming,
            priority=self.priority or priority,
            deadline_s=self.deadline_s,
            traceparent=self.traceparent,
            call_id=self.call_id,
            client_id=self.client_id,
            received_s=self.received_s,
        )
