"""The events of one simulation on a virtual clock: arrivals, steps, copies of KV pages, failures and scaling."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from quire.base.errors import RequestError
from quire.base.ids import RequestId
from quire.bench.serving.records import RequestRecord
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.engine.scheduling.admission import check_servable
from quire.engine.scheduling.events import SequenceUpdate
from quire.router.autoscale import Demand, Drain, Flip, Role, Scale, Snapshot, State, decide
from quire.router.retry_budget import RetryBudget
from quire.simulate.cluster import ClusterStats, Member, make_members, usable_of
from quire.simulate.events import MAX_RESUMES, MAX_RETRIES, RETRY_RATIO
from quire.simulate.replica import make_request
from quire.simulate.routing import Router, make_router
from quire.simulate.scaling import DemandMeter
from quire.simulate.workload import SimulatedLoad, SimulatedRequest

if TYPE_CHECKING:
    from quire.simulate.run import SimulateOptions

_ANSWERS: tuple[Role, ...] = ("serve", "decode")
_MAX_SLOWDOWN = 1.5
"""As in the engine: a prompt goes to a prefill replica if that is expected to take at most so many times as long."""
_FADING = 0.2
_PREFILL = "prefill-"


@dataclass(slots=True)
class _Prefill:
    """A prompt that a prefill replica computes for a request of another one, the target."""

    request: Request
    source: Member
    target: Member
    target_epoch: int
    num_pages: int
    begun_s: float


class Loop:
    """The events in order of time; those of one time in order of creation."""

    def __init__(self, options: SimulateOptions, load: SimulatedLoad) -> None:
        self.records = [
            RequestRecord(one.index, one.due_s, one.num_input_tokens, one.num_output_tokens) for one in load.requests
        ]
        self.members = make_members(options)
        self.stats = ClusterStats()
        self.chosen: list[int] = []
        self.last_s = 0.0
        self._router: Router = make_router(options.routing, len(self.members), options.scheduler)
        self._options = options
        self._load = load
        self._requests: dict[int, Request] = {}
        self._owners: dict[int, Member] = {}
        self._queued_s: dict[int, float] = {}  # when requests without a token came to the scheduler that answers them
        self._prefills: dict[RequestId, _Prefill] = {}
        self._attempts: dict[int, tuple[int, int]] = {}  # retries and resumes of a request
        self._budget = RetryBudget(RETRY_RATIO)
        self._held: deque[SimulatedRequest] = deque()  # by max_concurrency, in the client
        self._num_in_flight = 0
        self._entered_s = 0.0  # when the last request that was sent comes to a replica
        self._rng = random.Random(options.dataset.seed)
        self._num_left = len(load.requests)  # that have not reached a replica
        self._num_open = len(load.requests)  # that have not ended
        self._is_closed = False
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._external: list[float] = []  # times of events that may reach any replica, arrivals apart
        window_s = 15.0 if options.autoscale is None else options.autoscale.limits.window_s
        self._meters = {role: DemandMeter(window_s) for role in dict.fromkeys(member.role for member in self.members)}
        self._state = State()

    def run(self) -> None:
        """Handle all events until every request has ended."""
        for request in self._load.requests:
            self._at(request.due_s, self._on_due, request.index)
        for failure in self._options.failures:
            self._at_external(failure.at_s, self._on_failure, failure.replica, failure.restart_s)
        if self._options.autoscale is not None:
            self._at_external(self._options.autoscale.interval_s, self._on_scaling)
        now = 0.0
        while self._num_open and (self._events or self._start_incomplete(now)):
            now, _, handle, args = heapq.heappop(self._events)
            handle(*args, now)

    def _at(self, at_s: float, handle: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), handle, args))

    def _at_external(self, at_s: float, handle: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._external, at_s)
        self._at(at_s, handle, *args)

    # Requests on their way to a replica.

    def _on_due(self, index: int, now: float) -> None:
        self._held.append(self._load.requests[index])
        self._send(now)

    def _send(self, now: float) -> None:
        """Send what the client may send."""
        limit = self._options.arrivals.max_concurrency
        while self._held and (limit is None or self._num_in_flight < limit):
            simulated = self._held.popleft()
            record = self.records[simulated.index]
            record.outcome = "running"
            record.sent_s = now
            self._entered_s = max(self._entered_s, now + self._delay_s(now))
            self._num_in_flight += 1
            self._at(self._entered_s, self._on_enter, simulated.index)

    def _delay_s(self, now: float) -> float:
        """Return how long a request takes from its client to a replica, and its first token back."""
        delivery = self._options.delivery
        if delivery is None:
            return self._options.times.request_s
        idle_s = 0.0 if self._num_in_flight else now - self.last_s if self.chosen else math.inf
        return delivery.draw_delay(idle_s, self._rng)

    @property
    def _least_delay_s(self) -> float:
        delivery = self._options.delivery
        return self._options.times.request_s if delivery is None else delivery.least_delay_s

    def _on_enter(self, index: int, now: float) -> None:
        """Admit a request, and route it."""
        self._num_left -= 1
        self._budget.earn()
        simulated, record = self._load.requests[index], self.records[index]
        request = make_request(simulated)
        for role, meter in self._meters.items():
            if role != "decode":
                meter.note_prompt(now, simulated.num_input_tokens)
        try:
            check_servable(request, self._options.scheduler)
        except RequestError as error:
            record.status = 400
            record.fail("http_400", str(error), now)
            self._leave(now)
            return
        self._route(index, request, now)

    def _route(self, index: int, request: Request, now: float) -> None:
        """Give a request to a replica, or refuse it."""
        record = self.records[index]
        usable = usable_of(self.members, _ANSWERS)
        if not usable:
            record.status = 503
            record.fail("http_503", "no replica is available", now)
            self._leave(now)
            return
        chosen = self._router.choose(request, usable)
        member = self.members[chosen]
        most = self._options.max_waiting
        if most is not None and member.replica.num_unfinished >= self._options.scheduler.max_num_seqs + most:
            self._router.end(request, chosen)
            record.outcome, record.status, record.end_s = "rejected", 503, now
            self._leave(now)
            return
        self.chosen.append(chosen)
        self._requests[index] = request
        self._owners[index] = member
        self._close_queues(now)
        if not self._wait_for_pages(request, member, now):
            self._queue(request, member, now)

    def _queue(self, request: Request, member: Member, now: float) -> None:
        if not request.request_id.startswith(_PREFILL):
            self._queued_s[int(request.request_id)] = now
        member.replica.queue.add(request, now)
        if not member.replica.is_running:
            self._at(now, self._begin, member, member.epoch)  # after all that come at this moment

    def _wait_for_pages(self, request: Request, member: Member, now: float) -> bool:
        """Keep a request aside until its KV pages come from a prefill replica or the disk tier; return whether they do."""
        tiers = member.replica.tiers
        if tiers is None:
            return False
        if member.role == "decode":
            return self._ask_prefill(request, member, now)
        ready_s = tiers.read(request, now)
        if ready_s is None:
            return False
        self._at_external(ready_s, self._on_pages, request, member, member.epoch, "disk")
        return True

    def _on_pages(self, request: Request, member: Member, epoch: int, source: str, now: float) -> None:
        tiers = member.replica.tiers
        if member.epoch != epoch or tiers is None:
            return
        tiers.install(request.request_id, source)
        self._queue(request, member, now)

    # Prefill and decode apart.

    def _ask_prefill(self, request: Request, member: Member, now: float) -> bool:
        """Let a prefill replica compute the prompt's missing pages; return whether it does."""
        options, tiers = self._options.hand_over, member.replica.tiers
        assert options is not None
        assert tiers is not None
        scheduler = member.replica.scheduler
        block_size = scheduler.config.block_size
        keys = scheduler.missing_keys(request)
        num_pages = len(keys)
        if num_pages * block_size < options.min_tokens:
            return False
        sources = usable_of(self.members, ("prefill",))
        if not sources or not self._is_worth(member, num_pages, block_size):
            return False
        num_pages = tiers.reserve(request.request_id, keys)
        if num_pages * block_size < options.min_tokens:
            if num_pages:
                tiers.drop(request.request_id)
            return False
        source = min((self.members[one] for one in sources), key=lambda one: (one.replica.num_unfinished, one.index))
        first_page = scheduler.num_cacheable_pages(request) - len(keys)
        tokens = (*request.prompt_token_ids, *request.output_token_ids)[: (first_page + num_pages) * block_size]
        job = Request(
            request_id=RequestId(f"{_PREFILL}{next(self._numbers)}"),
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=1, ignore_eos=True),
            seed=0,
            arrival_time_s=now,
        )
        self._prefills[job.request_id] = _Prefill(request, source, member, member.epoch, num_pages, now)
        self._queue(job, source, now)
        return True

    def _is_worth(self, member: Member, num_pages: int, block_size: int) -> bool:
        """Return whether a hand-over is expected to be fast enough, as the engine decides it."""
        tiers = member.replica.tiers
        if tiers is None or member.pages_per_s is None or tiers.tokens_per_s is None:
            return True
        num_waiting = tiers.num_aside_tokens / block_size
        here_s = num_pages * block_size / tiers.tokens_per_s
        if (num_waiting + num_pages) / member.pages_per_s <= _MAX_SLOWDOWN * here_s:
            return True
        member.pages_per_s *= 1.05
        return False

    def _hand_over(self, job_id: RequestId, now: float) -> None:
        """Send the pages that a prefill replica has computed, unless the replica that waits for them has failed."""
        prefill, options = self._prefills.pop(job_id), self._options.hand_over
        target, link = prefill.target, prefill.source.link
        if target.epoch != prefill.target_epoch or options is None or link is None:
            return
        arrival_s = link.send(now, prefill.num_pages * options.page_bytes)
        rate, known = prefill.num_pages / max(arrival_s - prefill.begun_s, 1e-9), target.pages_per_s
        target.pages_per_s = rate if known is None else known + _FADING * (rate - known)
        self._note_wait("prefill", arrival_s - prefill.begun_s, now)
        self.stats.num_handed_over += 1
        self.stats.num_handed_pages += prefill.num_pages
        self._at_external(arrival_s, self._on_pages, prefill.request, target, target.epoch, "peer")

    # Steps.

    def _begin(self, member: Member, epoch: int, now: float) -> None:
        """Start a step of a replica, if none is under way and there is something to compute."""
        replica = member.replica
        if member.epoch != epoch or replica.is_running:
            return
        member.note_begin(now)
        end_s = replica.begin(now, self._horizon_s(member, now))
        if end_s is not None:
            self._at(end_s, self._on_step, member, epoch)
            return
        deadline_s = replica.queue.deadline_s
        if deadline_s is not None and deadline_s > now:
            self._at(deadline_s, self._begin, member, epoch)
        self._settle(member, now)

    def _horizon_s(self, member: Member, now: float) -> float:
        """Return until when nothing comes to a replica: the next arrival, an event of the cluster, a prompt that a prefill
        replica computes, or any event where ends let others in."""
        if self._options.arrivals.max_concurrency is not None:
            return self._events[0][0] if self._events else math.inf
        horizon_s = math.inf
        next_one = len(self._load.requests) - self._num_left
        if next_one < len(self._load.requests):
            horizon_s = max(self._load.requests[next_one].due_s + self._least_delay_s, now)
        while self._external and self._external[0] < now:
            heapq.heappop(self._external)
        if self._external:
            horizon_s = min(horizon_s, self._external[0])
        if self._options.hand_over is not None and member.role != "prefill":
            for other in self.members:
                if other.role == "prefill" and other.replica.num_unfinished:
                    until_s = other.replica.busy_until_s
                    horizon_s = min(horizon_s, now if until_s is None else until_s)
        return horizon_s

    def _on_step(self, member: Member, epoch: int, now: float) -> None:
        if member.epoch != epoch:
            return
        self.last_s = max(self.last_s, now)
        updates, ends_s = member.replica.end(now)
        seen_s = member.deliver(ends_s)
        for update in updates:
            if update.request_id.startswith(_PREFILL):
                if update.finish_reason is not None:
                    self._hand_over(RequestId(update.request_id), now)
            else:
                self._take(update, member, seen_s)
        self._begin(member, epoch, now)

    def _take(self, update: SequenceUpdate, member: Member, ends_s: list[float]) -> None:
        now = ends_s[-1]
        index = int(update.request_id)
        record = self.records[index]
        if update.new_token_ids:
            if record.first_choice_s is None:
                record.first_choice_s = record.first_visible_s = now
                record.usage_prompt_tokens = record.num_prompt_tokens
                self._note_wait("serve" if "serve" in self._meters else "decode", now - self._queued_s.pop(index, now), now)
            record.last_choice_s = now
            record.content_s.extend(ends_s)
            record.num_events += len(ends_s)
            self._router.note_output(self._requests[index], len(update.new_token_ids))
            self._note_output(now, len(update.new_token_ids))
        if update.finish_reason is None:
            return
        record.finish_reason = update.finish_reason
        record.usage_output_tokens = len(record.content_s)
        record.has_done = True
        record.end_s = now
        if update.finish_reason == "length":
            record.outcome = "ok"
            self._note_end(record, now)
        else:
            record.fail(f"finish_{update.finish_reason}", update.error or "", now)
        if update.stats is not None:
            record.usage_cached_tokens = update.stats.num_cached_tokens
        self._router.end(self._requests.pop(index), member.index)
        del self._owners[index]
        self._attempts.pop(index, None)
        self._queued_s.pop(index, None)
        self._leave(now)

    def _leave(self, now: float) -> None:
        """Take note that a request has ended."""
        self.last_s = max(self.last_s, now)
        self._num_in_flight -= 1
        self._num_open -= 1
        self._send(now)
        self._close_queues(now)

    def _close_queues(self, now: float) -> None:
        """Let incomplete batches start once no further request comes."""
        if self._num_left > 0 or self._is_closed:
            return
        self._is_closed = True
        for member in self.members:
            member.replica.queue.is_closed = True
            self._at(now, self._begin, member, member.epoch)

    def _start_incomplete(self, now: float) -> bool:
        """Let incomplete batches start where nothing else happens: the client waits for them. Return whether there were any."""
        waiting = [member for member in self.members if len(member.replica.queue)]
        for member in waiting:
            member.replica.queue.is_flushed = True
            self._at(now, self._begin, member, member.epoch)
        return bool(waiting)

    # Failures, and what the router does about them.

    def _on_failure(self, index: int, restart_s: float | None, now: float) -> None:
        member = self.members[index]
        if member.state not in ("ready", "draining"):
            return
        is_leaving = member.state == "draining"
        member.state = "failed" if restart_s is not None and not is_leaving else "off"
        member.role = member.next_role
        if member.state == "off":
            self.stats.replica_s += now - member.started_s
        else:
            self._at_external(now + (restart_s or 0.0), self._on_ready, member)
        member.restart(self.stats)
        member.replica.queue.is_closed = self._is_closed
        self._router.lose(index)
        for job_id in [key for key, one in self._prefills.items() if one.source is member]:
            self._lose_prefill(self._prefills.pop(job_id), now)
        for request_index in [one for one, owner in self._owners.items() if owner is member]:
            self._retry(request_index, member, now)

    def _lose_prefill(self, prefill: _Prefill, now: float) -> None:
        """Let the replica that waits for a lost prefill replica compute the prompt itself."""
        tiers = prefill.target.replica.tiers
        if prefill.target.epoch == prefill.target_epoch and tiers is not None:
            tiers.drop(prefill.request.request_id)
            self._queue(prefill.request, prefill.target, now)

    def _retry(self, index: int, member: Member, now: float) -> None:
        """Begin a request again on another replica, or continue its stream there, as the router does."""
        record = self.records[index]
        self._router.end(self._requests.pop(index), member.index)
        del self._owners[index]
        self._queued_s.pop(index, None)
        num_done = len(record.content_s)
        retries, resumes = self._attempts.get(index, (0, 0))
        may_go_on = resumes < MAX_RESUMES if num_done else retries < MAX_RETRIES
        if not may_go_on or not usable_of(self.members, _ANSWERS) or not self._budget.spend():
            record.fail("broken_stream" if num_done else "http_503", "the replica failed, and no other may go on", now)
            self._leave(now)
            return
        self._attempts[index] = (retries, resumes + 1) if num_done else (retries + 1, resumes)
        record.num_retries += 1
        if num_done:
            self.stats.num_resumes += 1
        else:
            self.stats.num_retries += 1
        request = make_request(self._load.requests[index], num_done)
        self._at_external(now + self._delay_s(now), self._on_retry, index, request)

    def _on_retry(self, index: int, request: Request, now: float) -> None:
        self._route(index, request, now)

    def _on_ready(self, member: Member, now: float) -> None:
        """A replica has started."""
        if member.state in ("starting", "failed"):
            member.state = "ready"

    # The autoscaler.

    def _on_scaling(self, now: float) -> None:
        options = self._options.autoscale
        assert options is not None
        replicas = tuple(found for member in self.members if (found := member.describe()) is not None)
        held = {replica.role for replica in replicas}
        demand = {role: self._read(role, now) for role in self._meters if role in held}
        actions, self._state = decide(Snapshot(now, replicas, demand), options.objectives, options.limits, self._state)
        for action in actions:
            if isinstance(action, Scale):
                self._scale(action, now)
            elif isinstance(action, Flip):
                member = self.members[int(action.replica)]
                member.next_role = action.role
                self.stats.actions.append((now, f"replica {member.index} becomes {action.role}"))
                self._settle(member, now)
            else:
                self._drain(action, now)
        self._at_external(now + options.interval_s, self._on_scaling)

    def _read(self, role: Role, now: float) -> Demand:
        options = self._options.autoscale
        assert options is not None
        held = [member for member in self.members if member.role == role and member.state in ("ready", "draining")]
        queued = sum(member.replica.num_queued_tokens for member in held)
        late_s = now - options.objectives.ttft_s
        began = (one.begun_s for one in self._prefills.values()) if role == "prefill" else self._queued_s.values()
        num_late = sum(at_s < late_s for at_s in began)
        return self._meters[role].read(now, queued, num_late)

    def _scale(self, action: Scale, now: float) -> None:
        """Start replicas of a role until it has as many as it should."""
        options = self._options.autoscale
        assert options is not None
        serving = [one for one in self.members if one.next_role == action.role and one.state in ("starting", "ready", "failed")]
        free = [one for one in self.members if one.state == "off"]
        free.sort(key=lambda one: (one.role != action.role, one.index))
        for member in free[: action.num_replicas - len(serving)]:
            member.state, member.started_s = "starting", now
            member.role = member.next_role = action.role
            self._at_external(now + options.start_s, self._on_ready, member)
        self.stats.actions.append((now, f"{action.role}: {action.num_replicas} replicas"))

    def _drain(self, action: Drain, now: float) -> None:
        for name in action.replicas:
            member = self.members[int(name)]
            if member.state == "starting":
                self._switch_off(member, now)
            elif member.state == "ready":
                member.state = "draining"
                self._settle(member, now)
        self.stats.actions.append((now, f"{', '.join(action.replicas)} drained"))

    def _settle(self, member: Member, now: float) -> None:
        """End a replica that has drained, and change the role of one that was to."""
        if member.replica.num_unfinished or member.replica.is_running:
            return
        if member.state == "draining":
            self._switch_off(member, now)
        elif member.next_role != member.role:
            member.role = member.next_role
            self.stats.actions.append((now, f"replica {member.index} is {member.role}"))

    def _switch_off(self, member: Member, now: float) -> None:
        self.stats.replica_s += now - member.started_s
        member.state = "off"
        member.restart(self.stats)
        member.replica.queue.is_closed = self._is_closed
        self._router.lose(member.index)

    def _note_wait(self, role: Role, wait_s: float, now: float) -> None:
        """Note how long a role took of a request's time to the first token."""
        options = self._options.autoscale
        if options is not None:
            self._meters[role].note_result(now, wait_s <= options.objectives.ttft_s)

    def _note_output(self, now: float, num_tokens: int) -> None:
        if self._options.autoscale is not None:
            self._meters["serve" if "serve" in self._meters else "decode"].note_output(now, num_tokens)

    def _note_end(self, record: RequestRecord, now: float) -> None:
        options, num_tokens = self._options.autoscale, len(record.content_s)
        if options is None or options.tpot_s is None or "decode" not in self._meters or num_tokens < 2:
            return
        tpot_s = (record.content_s[-1] - record.content_s[0]) / (num_tokens - 1)
        self._meters["decode"].note_result(now, tpot_s <= options.tpot_s)
