"""FairQueue: the waiting tickets and their order.

Two levels of fair queueing, see `fair_share`, which count service tokens: the upper level are the classes, the lower one their
owners. Batch stands outside: it is next only when nothing else waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from quire.base.errors import InvariantError
from quire.serving.admission.fair_share import FairClock, Share
from quire.serving.admission.ticket import Ticket, service_tokens
from quire.serving.interfaces import PriorityClass

CLASS_WEIGHTS: dict[PriorityClass, float] = {"interactive": 16.0, "default": 4.0, "batch": 1.0}
_ONLINE: tuple[PriorityClass, ...] = ("interactive", "default")


@dataclass(slots=True)
class Backlog:
    """Counts and tokens of waiting work."""

    num_requests: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_expected_tokens: int = 0

    def add(self, ticket: Ticket, sign: int = 1) -> None:
        """Add a ticket to the counts, or remove it with sign -1."""
        self.num_requests += sign
        self.num_sequences += sign * ticket.num_sequences
        self.num_prompt_tokens += sign * ticket.num_prompt_tokens
        self.num_expected_tokens += sign * ticket.num_expected_tokens


@dataclass(slots=True)
class _OwnerLine:
    share: Share
    tickets: OrderedDict[int, Ticket] = field(default_factory=OrderedDict[int, Ticket])
    backlog: Backlog = field(default_factory=Backlog)

    def first(self) -> Ticket:
        return next(iter(self.tickets.values()))


@dataclass(slots=True)
class _ClassLine:
    share: Share
    clock: FairClock = field(default_factory=FairClock)
    owners: dict[str, _OwnerLine] = field(default_factory=dict[str, _OwnerLine])
    waiting: dict[str, _OwnerLine] = field(default_factory=dict[str, _OwnerLine])
    backlog: Backlog = field(default_factory=Backlog)

    def first(self) -> Ticket:
        line = min(self.waiting.values(), key=lambda line: (line.share.received, line.first().number))
        return line.first()


class FairQueue:
    """Waiting tickets by class and owner. `weight_of` returns the share of an owner, above 0."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._classes = {name: _ClassLine(Share(weight)) for name, weight in CLASS_WEIGHTS.items()}
        self._clock = FairClock()

    def __len__(self) -> int:
        return sum(line.backlog.num_requests for line in self._classes.values())

    def __iter__(self) -> Iterator[Ticket]:
        for line in self._classes.values():
            for owner in line.waiting.values():
                yield from owner.tickets.values()

    def push(self, ticket: Ticket) -> None:
        """Append a ticket to its owner's queue."""
        name = ticket.job.owner.name
        line = self._classes[ticket.job.priority]
        owner = line.owners.get(name)
        if owner is None:
            owner = line.owners[name] = _OwnerLine(Share(self._weight_of(name)))
        if not line.waiting:
            self._clock.enter(line.share)
        if not owner.tickets:
            line.clock.enter(owner.share)
            line.waiting[name] = owner
        owner.tickets[ticket.number] = ticket
        owner.backlog.add(ticket)
        line.backlog.add(ticket)

    def peek(self) -> Ticket | None:
        """Return the next ticket, None if nothing waits."""
        waiting = [self._classes[name] for name in _ONLINE if self._classes[name].waiting]
        if waiting:
            return min(waiting, key=lambda line: line.share.received).first()
        batch = self._classes["batch"]
        return batch.first() if batch.waiting else None

    def pop(self) -> Ticket:
        """Remove the next ticket and charge its owner for it. Raises InvariantError if nothing waits."""
        ticket = self.peek()
        if ticket is None:
            raise InvariantError("a ticket was taken out of an empty queue")
        line = self._classes[ticket.job.priority]
        owner = line.owners[ticket.job.owner.name]
        if ticket.job.priority != "batch":
            self._clock.serve(line.share)
        line.clock.serve(owner.share)
        self.remove(ticket)
        self._charge(ticket, ticket.cost)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket without a charge; False if it does not wait."""
        line = self._classes[ticket.job.priority]
        owner = line.waiting.get(ticket.job.owner.name)
        if owner is None or owner.tickets.pop(ticket.number, None) is None:
            return False
        owner.backlog.add(ticket, -1)
        line.backlog.add(ticket, -1)
        if not owner.tickets:
            del line.waiting[ticket.job.owner.name]
        return True

    def settle(self, ticket: Ticket, num_output_tokens: int) -> None:
        """Correct the charge of a ticket that was removed earlier to its real cost."""
        self._charge(ticket, service_tokens(ticket.num_prompt_tokens, num_output_tokens) - ticket.cost)

    def _charge(self, ticket: Ticket, cost: float) -> None:
        line = self._classes[ticket.job.priority]
        owner = line.owners[ticket.job.owner.name]
        line.share.charge(cost)
        owner.share.charge(cost)

    def backlog(self, priority: PriorityClass, owner: str | None = None) -> Backlog:
        """Return the waiting work of a class, or of one owner in it. The caller must not change it."""
        line = self._classes[priority]
        if owner is None:
            return line.backlog
        found = line.owners.get(owner)
        return Backlog() if found is None else found.backlog

    def class_share(self, priority: PriorityClass) -> float:
        """Return the share of service that a class would get if it also had waiting work."""
        if priority == "batch":
            return 1.0
        weights = [CLASS_WEIGHTS[name] for name in _ONLINE if name == priority or self._classes[name].waiting]
        return CLASS_WEIGHTS[priority] / sum(weights)

    def owner_share(self, priority: PriorityClass, owner: str) -> float:
        """Return the share of its class that an owner would get if it also had waiting work."""
        weight = self._weight_of(owner)
        others = sum(line.share.weight for name, line in self._classes[priority].waiting.items() if name != owner)
        return weight / (weight + others)

    def oldest(self, priority: PriorityClass) -> Ticket | None:
        """Return the ticket of a class that has waited longest."""
        firsts = (line.first() for line in self._classes[priority].waiting.values())
        return min(firsts, key=lambda ticket: ticket.number, default=None)

    def check_invariants(self) -> None:
        """Raise InvariantError if the counts differ from the waiting tickets."""
        for name, line in self._classes.items():
            total = Backlog()
            for owner_name, owner in line.owners.items():
                own = Backlog()
                for ticket in owner.tickets.values():
                    own.add(ticket)
                    total.add(ticket)
                if own != owner.backlog or bool(owner.tickets) != (owner_name in line.waiting):
                    raise InvariantError(f"queue {name}: owner {owner_name} counts {owner.backlog}, holds {own}")
            if total != line.backlog:
                raise InvariantError(f"queue {name}: counts {line.backlog}, holds {total}")
