"""ExpertRebalancer: on rank 0, decides which experts move, from the load of the last steps, and drives the moves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.logging import get_logger
from quire.contracts.expert_options import EplbConfig
from quire.parallel.expert_balance import MAX_IMBALANCE, apply_moves, improve_changes
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.step_pacer import short_switch_interval
from quire.worker.expert_moves import ExpertChange, ExpertMover, LoadState
from quire.worker.expert_parallel import PlacedLoads

logger = get_logger(__name__)

Counts = Mapping[int, NDArray[np.int64]]
"""Tokens of each expert of each layer that has experts, by its index."""

_SNAPSHOTS = 16
"""A window is measured in this many parts."""

_POLL_S = 0.02
"""Interval at which ranks are compared while one of them loads."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The changes of a layer, in order, and max/mean of the ranks' loads before them and after all of them."""

    layer: int
    changes: tuple[ExpertChange, ...]
    before: float
    after: float


def plan_layers(
    placements: Mapping[int, ExpertPlacement],
    loads: Counts,
    shares: Sequence[float],
    limit: float = MAX_IMBALANCE,
    num_hosts: int = 1,
) -> list[LayerPlan]:
    """Return the changes of each layer; none for layers that are balanced or got no tokens. num_hosts: see improve_changes."""
    found: list[LayerPlan] = []
    for layer, placement in placements.items():
        load = loads[layer].tolist()
        first = before = placement.imbalance(load, shares)
        changes: list[ExpertChange] = []
        for moves in improve_changes(placement, load, shares, limit, num_hosts=num_hosts):
            placement = apply_moves(placement, moves)
            after = placement.imbalance(load, shares)
            changes.append(ExpertChange(layer, tuple(moves), before, after))
            before = after
        found.append(LayerPlan(layer, tuple(changes), first, before))
    return found


class LoadWindow:
    """The load of the last steps. It covers window_size steps, and up to a sixteenth more."""

    def __init__(self, window_size: int) -> None:
        self._size, self._interval = window_size, max(1, window_size // _SNAPSHOTS)
        self._num_steps = 0
        self._snapshots: deque[tuple[int, Counts]] = deque()

    def note_step(self, read: Callable[[], Counts]) -> None:
        """Count a step; read: returns the tokens so far."""
        self._num_steps += 1
        if self._num_steps % self._interval:
            return
        self._snapshots.append((self._num_steps, read()))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= self._num_steps - self._size:
            self._snapshots.popleft()

    def load(self, now: Counts) -> Counts:
        """Return the tokens of the window, given those so far; of all steps until there are as many."""
        if not self._snapshots or self._snapshots[0][0] > self._num_steps - self._size:
            return now
        begin = self._snapshots[0][1]
        return {layer: counts - begin[layer] for layer, counts in now.items()}


class ExpertRebalancer:
    """Rank 0's part of moving experts. All methods are called between steps, by the thread that runs them.

    mover   this rank's
    send    tells the other ranks to prepare a change; None: to switch
    read    returns the tokens so far
    loads   gets every new placement, for statistics
    save    writes the placements to a file, after each rebalancing; None: no file
    num_hosts  of the ranks: experts stay on theirs where they can
    """

    def __init__(
        self,
        mover: ExpertMover,
        send: Callable[[ExpertChange | None], None],
        read: Callable[[], Counts],
        loads: PlacedLoads,
        options: EplbConfig,
        save: Callable[[], None] | None,
        num_hosts: int = 1,
    ) -> None:
        self._mover, self._send, self._read, self._loads = mover, send, read, loads
        self._options, self._save, self._num_hosts = options, save, num_hosts
        self._window = LoadWindow(options.window_size)
        self._num_steps = 0
        self._planning: threading.Thread | None = None
        self._plans: list[LayerPlan] = []
        self._changes: deque[ExpertChange] = deque()
        self._moving: ExpertChange | None = None
        self._num_moved, self._next_poll_s = 0, 0.0

    @property
    def is_active(self) -> bool:
        """Whether experts are being moved, or moves are planned."""
        return self._planning is not None or self._moving is not None or bool(self._changes)

    def note_step(self) -> None:
        """Count a step, and begin to rebalance after every step_interval of them."""
        self._window.note_step(self._read)
        self._num_steps += 1
        if self._num_steps % self._options.step_interval == 0:
            self.start()

    def start(self) -> bool:
        """Begin to rebalance, from the load of the window; False: they are being moved already, or there is no thread."""
        if self.is_active:
            return False
        load = self._window.load(self._read())
        placements = dict(self._mover.placements)
        planning = threading.Thread(target=self._plan, args=(placements, load), name="quire-place-experts", daemon=True)
        try:
            planning.start()
        except RuntimeError as error:  # the system has no thread for it
            logger.error("the experts cannot be rebalanced now: %s", error)
            return False
        self._planning = planning
        return True

    def _plan(self, placements: Mapping[int, ExpertPlacement], load: Counts) -> None:
        try:
            with short_switch_interval():
                self._plans = plan_layers(placements, load, self._loads.shares, num_hosts=self._num_hosts)
        except Exception:  # a bug here must not end an engine that serves
            logger.exception("the experts cannot be rebalanced")
            self._plans = []

    def advance(self) -> None:
        """Do what is due between two steps: begin the next change, or switch to one that all ranks have loaded."""
        if self._planning is not None:
            if self._planning.is_alive():
                return
            self._planning = None
            self._take_plans()
        if self._moving is not None:
            self._try_switch(self._moving)
        elif self._changes:  # not in the step that switches, which would take longer
            self._moving = self._changes.popleft()
            self._send(self._moving)
            self._mover.prepare(self._moving)
            self._next_poll_s = 0.0

    def _take_plans(self) -> None:
        self._num_moved = 0
        for plan in self._plans:
            self._loads.note_plan(plan.layer, plan.before, plan.after)
            self._changes.extend(plan.changes)
        num_moves = sum(len(change.moves) for change in self._changes)
        if num_moves or self._options.log_balancedness:
            worst = max(self._plans, key=lambda plan: plan.before, default=None)
            logger.info(
                "experts: %d slots in %d layers are to move; max/mean of the ranks %s",
                num_moves,
                len({change.layer for change in self._changes}),
                "unknown" if worst is None else f"at most {worst.before:.3f} (layer {worst.layer})",
            )

    def _try_switch(self, change: ExpertChange) -> None:
        now = time.monotonic()
        if self._mover.state is LoadState.LOADING or now < self._next_poll_s:
            return
        self._send(None)
        found = self._mover.switch()
        self._next_poll_s = now + _POLL_S
        if found is LoadState.LOADING:
            return
        self._moving = None
        names = ", ".join(f"expert {move.new} to rank {move.rank} in place of {move.old}" for move in change.moves)
        if found is LoadState.FAILED:
            # The changes that were planned after it may depend on it.
            self._loads.note_failure(change.layer, len(change.moves))
            logger.error("experts: layer %d: %s: a rank could not load it, so the placement stays", change.layer, names)
            self._changes.clear()
        else:
            counts = self._read()[change.layer].tolist()
            self._loads.switch(change.layer, self._mover.placements[change.layer], counts, len(change.moves))
            self._num_moved += len(change.moves)
            text = "experts: layer %d: %s; max/mean %.3f before, %.3f after"
            logger.info(text, change.layer, names, change.before, change.after)
        if not self._changes and self._num_moved and self._save is not None:
            self._save()
