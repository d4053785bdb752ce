"""decide: how many replicas a cluster should have, as a pure function: no clock, no input or output.

Demand is what arrives, in tokens a second, with what waits in queues and what was refused; supply is what one replica
computes at its objective. The load of a role is demand / supply, in replicas. A role gets replicas when its load is above 0.8
of them, or when its queue would take longer than half the objective; it loses one when the others would stay below that for a
while, with room to spare. After a replica was taken too early, the next is taken later, so a constant load ends in a constant
number.
Prefill and decode replicas change their role (flip) where one role misses its objective and the other does not, which takes
seconds, before replicas are started, which takes minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from quire.base.errors import ConfigError

Role = Literal["serve", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("serve", "prefill", "decode")
ReplicaState = Literal["starting", "ready", "draining"]
_OTHER: Mapping[Role, Role] = {"prefill": "decode", "decode": "prefill"}
_LOW_ATTAINMENT = 0.9
_GOOD_ATTAINMENT = 0.98
_FLIP_WINDOWS = 2
_DOWN_ROOM = 0.85
"""A replica is taken only if the load of the others stays below this share of what adds one."""
_DOWN_PART = 4
"""At most one in so many replicas is taken at once."""
_MAX_DOWN_DELAY_FACTOR = 64


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica. num_running: requests that it has, for the choice of the one to drain."""

    name: str
    role: Role = "serve"
    state: ReplicaState = "ready"
    num_running: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What clients want of one role. No traffic is 0, not an absent Demand.

    prompt_tokens_per_s, output_tokens_per_s  that arrive, refused ones included: the mean of about 45 s
    recent_share       arrivals of the last 5 s divided by that mean; it counts while there is a queue
    queued_tokens      prompt tokens that wait
    attainment         share of the requests of the last window within the objective; None without requests
    """

    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    recent_share: float = 1.0
    queued_tokens: float = 0.0
    attainment: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment. demand: of each role with replicas; a role without one is left as it is.

    now_s  on any clock that only goes forward
    """

    now_s: float
    replicas: tuple[Replica, ...]
    demand: Mapping[Role, Demand]


@dataclass(frozen=True, slots=True)
class Objectives:
    """What one replica does at its objective, and the objective itself.

    ttft_s                to the first token
    prompt_tokens_per_s   that a replica computes with no output, output_tokens_per_s that it generates with no prompts, both
                          within the objective; a mixed load takes the sum of its shares
    """

    ttft_s: float = 1.0
    prompt_tokens_per_s: float = 10_000.0
    output_tokens_per_s: float = 1_000.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "prompt_tokens_per_s", "output_tokens_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be done.

    min_replicas, max_replicas  of each role
    utilization        load per replica above which one is added
    up_delay_s         after an action of a role, before one is added; down_delay_s: for so long a replica must be superfluous
    action_timeout_s   after which an action that shows no effect counts as failed
    queue_delay_s      for which a queue must be too long before it adds a replica: one burst does not
    flip_delay_s       between two flips; window_s: between two looks at attainments
    """

    min_replicas: int = 1
    max_replicas: int = 8
    utilization: float = 0.8
    up_delay_s: float = 30.0
    down_delay_s: float = 300.0
    action_timeout_s: float = 600.0
    queue_delay_s: float = 10.0
    flip_delay_s: float = 60.0
    window_s: float = 15.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            given = f"{self.min_replicas} and {self.max_replicas}"
            raise ConfigError(f"min_replicas must be at least 1 and at most max_replicas, got {given}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization must be above 0 and at most 1, got {self.utilization}")
        for name in ("up_delay_s", "down_delay_s", "action_timeout_s", "queue_delay_s", "flip_delay_s", "window_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Scale:
    """Start replicas until the role has this many."""

    role: Role
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Let replicas of one role end what they run, and stop them."""

    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flip:
    """Give a replica another role."""

    replica: str
    role: Role


Action = Scale | Drain | Flip


@dataclass(frozen=True, slots=True)
class RoleState:
    """What is remembered of a role.

    action, action_s     that is under way, and since when
    last_action_s        when one was last taken; last_down_s: a Drain
    superfluous_since_s  since when one replica is too many; None: none is
    queued_since_s       since when the queue is too long; None: it is not. least_peak: of the arrivals since then
    down_delay_factor    grows where a replica that was taken was missed soon after
    """

    action: Action | None = None
    action_s: float = -math.inf
    last_action_s: float = -math.inf
    last_down_s: float = -math.inf
    superfluous_since_s: float | None = None
    queued_since_s: float | None = None
    least_peak: float = 0.0
    down_delay_factor: int = 1


@dataclass(frozen=True, slots=True)
class State:
    """What `decide` remembers; give it back with the next snapshot.

    num_windows  role -> windows in a row in which it missed its objective while the other met its own
    """

    roles: Mapping[Role, RoleState] = field(default_factory=dict[Role, RoleState])
    flip: Flip | None = None
    flip_s: float = -math.inf
    window_s: float = -math.inf
    num_windows: Mapping[Role, int] = field(default_factory=dict[Role, int])


def decide(snapshot: Snapshot, objectives: Objectives, limits: Limits, state: State) -> tuple[tuple[Action, ...], State]:
    """Return what is to be done now, and the state for the next call."""
    state = _settle(snapshot, limits, state)
    flip, state = _choose_flip(snapshot, objectives, limits, state)
    if flip is not None:
        return (flip,), state
    actions: list[Action] = []
    roles = dict(state.roles)
    for role in ROLES:
        demand = snapshot.demand.get(role)
        if demand is None or (state.flip is not None and role in _OTHER):
            continue
        action, roles[role] = _scale(snapshot, role, _load(demand, role, objectives), limits, roles.get(role, RoleState()))
        if action is not None:
            actions.append(action)
    return tuple(actions), replace(state, roles=roles)


@dataclass(frozen=True, slots=True)
class _Load:
    """In replicas: what arrives, and how many the queue needs to be empty within half an objective; 0 for a short one."""

    steady: float
    peak: float
    queue: float


def _load(demand: Demand, role: Role, objectives: Objectives) -> _Load:
    prompts = demand.prompt_tokens_per_s / objectives.prompt_tokens_per_s if role != "decode" else 0.0
    outputs = demand.output_tokens_per_s / objectives.output_tokens_per_s if role != "prefill" else 0.0
    steady = prompts + outputs
    queue = demand.queued_tokens / (objectives.prompt_tokens_per_s * objectives.ttft_s / 2)
    return _Load(steady, max(steady, steady * demand.recent_share), queue)


def _of_role(snapshot: Snapshot, role: Role) -> list[Replica]:
    """Return those that serve, or will: what drains is no supply any more."""
    return [one for one in snapshot.replicas if one.role == role and one.state != "draining"]


def _scale(snapshot: Snapshot, role: Role, load: _Load, limits: Limits, state: RoleState) -> tuple[Action | None, RoleState]:
    now_s, serving = snapshot.now_s, _of_role(snapshot, role)
    num = len(serving)
    target = max(math.ceil(load.steady / limits.utilization - 1e-9), limits.min_replicas)
    state = _note_queue(state, load, num, now_s)
    if state.queued_since_s is not None and now_s - state.queued_since_s >= limits.queue_delay_s:
        target = max(target, num + 1, math.ceil(state.least_peak / limits.utilization - 1e-9))
    target = min(target, limits.max_replicas)
    if target > num:
        state = replace(state, superfluous_since_s=None)
        if state.action is not None or now_s - state.last_action_s < limits.up_delay_s:
            return None, state
        return _start(Scale(role, target), now_s, _note_missed(state, now_s, limits))
    needed = max(math.ceil(load.steady / (limits.utilization * _DOWN_ROOM) - 1e-9), math.ceil(load.queue), limits.min_replicas)
    needed = min(needed, limits.max_replicas)
    if needed >= num:
        return None, replace(state, superfluous_since_s=None)
    since_s = now_s if state.superfluous_since_s is None else state.superfluous_since_s
    state = replace(state, superfluous_since_s=since_s)
    delay_s = limits.down_delay_s * state.down_delay_factor
    if state.action is not None or now_s - since_s < delay_s or now_s - state.last_action_s < limits.up_delay_s:
        return None, state
    order = sorted(serving, key=lambda one: (one.state != "starting", one.num_running, one.name))
    num_drained = min(num - needed, max(num // _DOWN_PART, 1))
    action, state = _start(Drain(tuple(one.name for one in order[:num_drained])), now_s, state)
    return action, replace(state, last_down_s=now_s, superfluous_since_s=None)


def _note_queue(state: RoleState, load: _Load, num: int, now_s: float) -> RoleState:
    """Note since when the queue takes longer than half an objective, and how much arrived all that time."""
    if load.queue <= num:
        return replace(state, queued_since_s=None, least_peak=0.0)
    if state.queued_since_s is None:
        return replace(state, queued_since_s=now_s, least_peak=load.peak)
    return replace(state, least_peak=min(state.least_peak, load.peak))


def _note_missed(state: RoleState, now_s: float, limits: Limits) -> RoleState:
    """Wait longer with the next replica that seems superfluous, where the last one is missed now."""
    delay_s = limits.down_delay_s * state.down_delay_factor
    if now_s - state.last_down_s > 2 * delay_s + limits.action_timeout_s:
        return state
    return replace(state, down_delay_factor=min(2 * state.down_delay_factor, _MAX_DOWN_DELAY_FACTOR))


def _start(action: Action, now_s: float, state: RoleState) -> tuple[Action, RoleState]:
    return action, replace(state, action=action, action_s=now_s, last_action_s=now_s)


def _settle(snapshot: Snapshot, limits: Limits, state: State) -> State:
    """Forget the actions that are done, or failed."""
    replicas = {one.name: one for one in snapshot.replicas}
    roles: dict[Role, RoleState] = {}
    for role, one in state.roles.items():
        is_over = one.action is not None and (
            _is_done(one.action, snapshot, replicas) or snapshot.now_s - one.action_s > limits.action_timeout_s
        )
        roles[role] = replace(one, action=None) if is_over else one
    flip = state.flip
    if flip is not None and (_is_done(flip, snapshot, replicas) or snapshot.now_s - state.flip_s > limits.action_timeout_s):
        flip = None
    return replace(state, roles=roles, flip=flip)


def _is_done(action: Action, snapshot: Snapshot, replicas: Mapping[str, Replica]) -> bool:
    if isinstance(action, Scale):
        return sum(one.state == "ready" for one in _of_role(snapshot, action.role)) >= action.num_replicas
    if isinstance(action, Drain):
        return not any(name in replicas for name in action.replicas)
    found = replicas.get(action.replica)
    return found is None or (found.role == action.role and found.state == "ready")


def _choose_flip(snapshot: Snapshot, objectives: Objectives, limits: Limits, state: State) -> tuple[Flip | None, State]:
    """Return a replica that is to change its role, where one role suffers and the other has more than it needs."""
    now_s = snapshot.now_s
    if now_s - state.window_s < limits.window_s:
        return None, state
    windows: dict[Role, int] = {}
    for role, other in _OTHER.items():
        own, others = snapshot.demand.get(role), snapshot.demand.get(other)
        is_missed = own is not None and own.attainment is not None and own.attainment < _LOW_ATTAINMENT
        is_met = others is not None and (others.attainment is None or others.attainment > _GOOD_ATTAINMENT)
        windows[role] = state.num_windows.get(role, 0) + 1 if is_missed and is_met else 0
    state = replace(state, window_s=now_s, num_windows=windows)
    if state.flip is not None or now_s - state.flip_s < limits.flip_delay_s:
        return None, state
    for role, other in _OTHER.items():
        if windows[role] < _FLIP_WINDOWS:
            continue
        givers = [one for one in _of_role(snapshot, other) if one.state == "ready"]
        load = _load(snapshot.demand[other], other, objectives)
        has_room = load.steady <= (len(givers) - 1) * limits.utilization and load.queue <= len(givers) - 1
        if len(givers) <= limits.min_replicas or not has_room or len(_of_role(snapshot, role)) >= limits.max_replicas:
            continue
        flip = Flip(min(givers, key=lambda one: (one.num_running, one.name)).name, role)
        return flip, replace(state, flip=flip, flip_s=now_s, num_windows={})
    return None, state
