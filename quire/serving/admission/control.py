"""AdmissionControl: admits or refuses jobs, and returns the next one when the engine has room."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence

from quire.serving.admission.fair_queue import FairQueue
from quire.serving.admission.fair_share import exceeds_share
from quire.serving.admission.limits import OwnerLimits, check_key
from quire.serving.admission.rates import ServiceRates
from quire.serving.admission.ticket import Ticket
from quire.serving.config import ApiKey, ServerConfig
from quire.serving.engine_client.messages import StepReport
from quire.serving.errors import ApiError, deadline_exceeded, overloaded, rate_limited, spread_s
from quire.serving.interfaces import Job, PriorityClass

BATCH_WINDOW_FACTOR = 2


class AdmissionControl:
    """The queue before the engine. Every ticket that `admit` returns must be passed to `finish` exactly once, even if it was
    never taken.

    Classes: the estimated wait of "interactive" and "default" is bounded by max_queue_wait_s. "batch" may wait as long as its
    deadline allows and takes no room from the others, but at most 2 * max_num_seqs of its sequences are in the queue and in the
    engine.
    Of those, requests of service tier "flex" leave room for one line of a batch, and each key is limited to its share.
    max_concurrent of a key does not count the lines of batches; its rate limits do. Raises ConfigError for a key with an
    impossible limit.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        max_num_seqs: int = 1,
    ) -> None:
        self._config = config
        self._clock = clock
        self._random = random
        for key in config.api_keys:
            check_key(key)
        self._keys: dict[str, ApiKey] = {key.name: key for key in config.api_keys}
        self._owners: dict[str, OwnerLimits] = {}
        self._taken: dict[int, Ticket] = {}
        self._num_taken_sequences = self._num_taken_expected = 0
        self._num_taken_batch_sequences = self._num_taken_batch_expected = 0
        self._num_held_online = self._num_held_batch = 0
        self._num_admitted = 0
        self.queue = FairQueue(lambda name: self.limits_of(name).weight)
        self.rates = ServiceRates()
        self.max_num_seqs = max_num_seqs

    @property
    def num_taken_sequences(self) -> int:
        """Return how many sequences are in the engine, waiting there or running."""
        return self._num_taken_sequences

    @property
    def num_taken_batch_sequences(self) -> int:
        """Return how many sequences of class "batch" are in the engine."""
        return self._num_taken_batch_sequences

    @property
    def batch_window(self) -> int:
        """Return how many sequences of class "batch" may be queued and in the engine."""
        return BATCH_WINDOW_FACTOR * self.max_num_seqs

    def admit(self, job: Job) -> Ticket:
        """Queue a job. Raises ApiError: 408 past its deadline, 429 over a limit of its key, 503 when it would wait too long."""
        now_s = self._clock()
        owner = self.limits_of(job.owner.name)
        num_sequences = job.request.params.num_sequences
        expected = 0 if job.request.pooling else num_sequences * owner.expected_output_tokens(job.request.params.max_tokens)
        num_prompt_tokens = len(job.request.prompt_token_ids)
        if job.deadline_s is not None and job.deadline_s <= now_s:
            raise deadline_exceeded(while_queued=True)
        self._check_key(job, owner, num_prompt_tokens + expected, now_s)
        if job.priority == "batch":
            self._check_batch_window(job, owner, num_sequences)
        else:
            self._check_room(job, owner, num_sequences, num_prompt_tokens)
        self._check_wait(job, num_sequences, num_prompt_tokens, now_s)
        owner.charge(num_prompt_tokens + expected, now_s, num_requests=int(_call_of(job) not in owner.calls))
        self._hold(job, owner, num_sequences, 1)
        self._num_admitted += 1
        ticket = Ticket(
            job=job,
            number=self._num_admitted,
            num_sequences=num_sequences,
            num_prompt_tokens=num_prompt_tokens,
            num_expected_tokens=expected,
            enqueued_s=now_s,
        )
        self.queue.push(ticket)
        return ticket

    @contextlib.contextmanager
    def holding(self, owner: str, call_id: str) -> Generator[None]:
        """Count a call as in flight for its key, even before it has jobs. Raises ApiError 429 over the key's limit."""
        limits = self.limits_of(owner)
        self._check_concurrent(limits, call_id)
        limits.calls[call_id] += 1
        try:
            yield
        finally:
            limits.calls[call_id] -= 1
            if not limits.calls[call_id]:
                del limits.calls[call_id]

    def take(self, capacity: int) -> Ticket | None:
        """Return the next ticket for an engine that holds at most `capacity` sequences; None if it is full or no ticket waits.

        A ticket with more sequences than that is taken when the engine is empty. A ticket that does not fit yet blocks the ones
        after it. Batches are paused for others in the engine, so they do not count against the capacity for other classes.
        """
        ticket = self.queue.peek()
        if ticket is None:
            return None
        num_taken, _ = self._taken_before(ticket.job.priority)
        if num_taken and num_taken + ticket.num_sequences > capacity:
            return None
        self.queue.pop()
        self._taken[ticket.number] = ticket
        self._count_taken(ticket, 1)
        return ticket

    def finish(self, ticket: Ticket, num_output_tokens: int, is_complete: bool) -> None:
        """Remove a ticket, whether it waits or runs, and correct its charge by its real length.

        is_complete  whether its outputs were not aborted, so that their length predicts this owner's next outputs
        """
        owner = self.limits_of(ticket.job.owner.name)
        self._hold(ticket.job, owner, ticket.num_sequences, -1)
        if self._taken.pop(ticket.number, None) is None:
            self.queue.remove(ticket)
            unused = ticket.num_prompt_tokens + ticket.num_expected_tokens
        else:
            self._count_taken(ticket, -1)
            self.queue.settle(ticket, num_output_tokens)
            unused = ticket.num_expected_tokens - num_output_tokens
        owner.charge(-unused, self._clock(), num_requests=0)
        if is_complete and ticket.job.request.pooling is None:
            owner.learn(math.ceil(num_output_tokens / ticket.num_sequences))

    def observe(self, report: StepReport) -> None:
        """Record a step of the engine. It updates the service rates if the engine was saturated."""
        is_saturated = report.num_waiting > 0 or len(self.queue) > 0 or report.num_running >= self.max_num_seqs
        self.rates.observe(report, is_saturated)

    def estimated_wait_s(self, priority: PriorityClass, owner: str, num_sequences: int = 1) -> float:
        """Return the expected time from now to the first step of a new job.

        The minimum of three: all work before it at the full rate, its class's work at the class's share, its owner's work at
        the owner's share.
        """
        is_empty = all(self.queue.backlog(name).num_requests == 0 for name in self._ahead(priority))
        num_taken, num_expected = self._taken_before(priority)
        if is_empty and num_taken + num_sequences <= self.max_num_seqs:
            return 0.0
        seconds = self._seconds_of_class
        before_s = sum(seconds(name) for name in self._ahead(priority) if name != priority)
        in_class = self.queue.backlog(priority, owner)
        own_s = self.rates.seconds_of(in_class.num_prompt_tokens, in_class.num_expected_tokens)
        class_s = min(seconds(priority), own_s / self.queue.owner_share(priority, owner))
        wait_s = (
            min(before_s + class_s, class_s / self.queue.class_share(priority)) if priority != "batch" else before_s + class_s
        )
        slots = max(min(num_taken, self.max_num_seqs), 1)
        return wait_s + self.rates.seconds_of(0, num_expected / slots)

    @property
    def work_left_s(self) -> float:
        """Return how long the engine needs for all queued and running work, except batches; 0 while its rates are unknown."""
        queued_s = sum(self._seconds_of_class(name) for name in self._ahead("default"))
        return queued_s + self.rates.seconds_of(0, self._num_taken_expected)

    def ratelimit_headers(self, owner: str) -> dict[str, str]:
        """Return the x-ratelimit-* headers of an owner; empty if it has no rate limits."""
        return self.limits_of(owner).headers(self._clock())

    def check_invariants(self) -> None:
        """Raise InvariantError if the counts differ from the actual tickets."""
        self.queue.check_invariants()

    @property
    def is_empty(self) -> bool:
        """Return whether no ticket waits or is in the engine, and every count is 0."""
        taken = (*self._taken_before("batch"), self._num_taken_batch_sequences, self._num_taken_batch_expected)
        counts = (*taken, self._num_held_online, self._num_held_batch)
        held = any(owner.calls or owner.num_sequences or owner.num_flex_sequences for owner in self._owners.values())
        return not (len(self.queue) or self._taken or any(counts) or held)

    def retry_after_s(self, seconds: float) -> float:
        """Return the Retry-After for room that is expected in `seconds`, with random jitter so that clients do not all return
        at once."""
        return spread_s(seconds, self._random)

    def limits_of(self, name: str) -> OwnerLimits:
        found = self._owners.get(name)
        if found is None:
            found = self._owners[name] = OwnerLimits(self._keys.get(name), self._clock())
        return found

    def _hold(self, job: Job, owner: OwnerLimits, num_sequences: int, sign: int) -> None:
        if job.priority == "batch":
            self._num_held_batch += sign * num_sequences
            if not job.has_client:
                return
            owner.num_flex_sequences += sign * num_sequences
        else:
            self._num_held_online += sign * num_sequences
            owner.num_sequences += sign * num_sequences
        owner.calls[_call_of(job)] += sign
        if not owner.calls[_call_of(job)]:
            del owner.calls[_call_of(job)]

    def _count_taken(self, ticket: Ticket, sign: int) -> None:
        self._num_taken_sequences += sign * ticket.num_sequences
        self._num_taken_expected += sign * ticket.num_expected_tokens
        if ticket.job.priority == "batch":
            self._num_taken_batch_sequences += sign * ticket.num_sequences
            self._num_taken_batch_expected += sign * ticket.num_expected_tokens

    def _taken_before(self, priority: PriorityClass) -> tuple[int, int]:
        """Return the number of sequences in the engine before a class, and their expected output tokens."""
        if priority == "batch":
            return self._num_taken_sequences, self._num_taken_expected
        return (
            self._num_taken_sequences - self._num_taken_batch_sequences,
            self._num_taken_expected - self._num_taken_batch_expected,
        )

    def _ahead(self, priority: PriorityClass) -> Sequence[PriorityClass]:
        return ("interactive", "default", "batch") if priority == "batch" else ("interactive", "default")

    def _seconds_of_class(self, priority: PriorityClass) -> float:
        backlog = self.queue.backlog(priority)
        return self.rates.seconds_of(backlog.num_prompt_tokens, backlog.num_expected_tokens)

    def _check_key(self, job: Job, owner: OwnerLimits, num_tokens: int, now_s: float) -> None:
        if job.priority != "batch" or job.has_client:
            self._check_concurrent(owner, _call_of(job))
        wait_s, rate = owner.seconds_until(num_tokens, now_s, num_requests=int(_call_of(job) not in owner.calls))
        if wait_s > 0:
            raise rate_limited(f"this key is over its limit of {rate}", self.retry_after_s(wait_s))

    def _check_concurrent(self, owner: OwnerLimits, call_id: str) -> None:
        limit, held = owner.max_concurrent, len(owner.calls)
        if limit is not None and held >= limit and call_id not in owner.calls:
            raise rate_limited(f"this key has {held} requests in flight, its limit is {limit}", self.retry_after_s(1))

    def _check_batch_window(self, job: Job, owner: OwnerLimits, num_sequences: int) -> None:
        held, own = self._num_held_batch, owner.num_flex_sequences
        window = self.batch_window - 1 if job.has_client else self.batch_window
        if held and held + num_sequences > window:
            raise overloaded(f"{held} sequences of class batch are in flight, the window is {window}", self.retry_after_s(1))
        if job.has_client and exceeds_share(own, num_sequences, window - held, owner.weight):
            raise rate_limited(
                f"this key holds {own} sequences of service tier flex, more than its share of the {window} there may be",
                self.retry_after_s(1),
            )

    def _check_room(self, job: Job, owner: OwnerLimits, num_sequences: int, num_prompt_tokens: int) -> None:
        waiting_tokens = sum(self.queue.backlog(name).num_prompt_tokens for name in self._ahead(job.priority))
        own_tokens = sum(self.queue.backlog(name, job.owner.name).num_prompt_tokens for name in self._ahead(job.priority))
        rows = (
            ("sequences", num_sequences, self._num_held_online, owner.num_sequences, self._config.max_queued_requests),
            ("prompt tokens", num_prompt_tokens, waiting_tokens, own_tokens, self._config.max_queued_tokens),
        )
        for what, wanted, held, own, limit in rows:
            others = held - own
            if held and held + wanted > limit:
                message = f"the queue holds {held} {what}, at most {limit} may be in it"
            elif self._keys and exceeds_share(own, wanted, limit - held, owner.weight):
                message = f"this key holds {own} {what} of {held} in the queue, more than its share of the {limit} there may be"
            else:
                continue
            wait_s = self.estimated_wait_s(job.priority, job.owner.name, num_sequences)
            # Retrying is useful only after a quarter of the queue has drained, even if the wait is short.
            excess_s = max(wait_s - self._config.max_queue_wait_s, wait_s / 4)
            raise self._refusal(message, excess_s, is_own_fault=others > 0 and own > others)

    def _check_wait(self, job: Job, num_sequences: int, num_prompt_tokens: int, now_s: float) -> None:
        wait_s = self.estimated_wait_s(job.priority, job.owner.name, num_sequences)
        cap_s = math.inf if job.priority == "batch" else self._config.max_queue_wait_s
        if job.deadline_s is not None:
            # The job's own prompt counts only against the deadline: otherwise an idle server would refuse a long prompt.
            cap_s = min(cap_s, job.deadline_s - now_s - self.rates.seconds_of(num_prompt_tokens, 0))
        if wait_s == 0 or wait_s <= cap_s:
            return
        message = f"a request would wait about {wait_s:.0f} s here, longer than the {max(cap_s, 0):.0f} s that it may"
        owner = self.limits_of(job.owner.name)
        is_own_fault = 0 < self._num_held_online - owner.num_sequences < owner.num_sequences
        raise self._refusal(message, wait_s - cap_s, is_own_fault=is_own_fault)

    def _refusal(self, message: str, excess_s: float, is_own_fault: bool) -> ApiError:
        retry_after_s = self.retry_after_s(excess_s)
        return rate_limited(message, retry_after_s) if is_own_fault else overloaded(message, retry_after_s)


def _call_of(job: Job) -> str:
    """Return the id that a key's limits count: the client's request, which may have several jobs."""
    return job.call_id or job.request.request_id
