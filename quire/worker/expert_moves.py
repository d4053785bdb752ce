"""ExpertMover: on each rank, loads the experts that the rank gets in a thread, and switches to them between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from quire.base.errors import InvariantError
from quire.base.logging import get_logger
from quire.parallel.communicator import Communicator, least_of
from quire.parallel.expert_balance import Move, apply_moves
from quire.parallel.expert_placement import ExpertPlacement
from quire.parallel.step_pacer import StepPacer, short_switch_interval
from quire.worker.expert_parallel import Placements

logger = get_logger(__name__)

LoadExpert = Callable[[int, int], Any]
"""(layer, expert) -> its weights, in the form that the decoder's place_experts takes."""


class PlacesExperts(Protocol):
    """The part of a decoder that moves need."""

    def place_experts(self, layer: int, added: Mapping[int, Any], placement: ExpertPlacement, rank: int) -> None:
        """Give a rank other experts of a layer, between two steps; added: the weights of those that it gets."""
        ...


class LoadState(IntEnum):
    """How far a rank is with the experts that it gets. The smallest of all ranks is that of the group."""

    FAILED = 0
    LOADING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class ExpertChange:
    """Slots of one layer that get other experts at the same step; max/mean of the ranks' planned loads before and after it."""

    layer: int
    moves: tuple[Move, ...]
    before: float = 1.0
    after: float = 1.0


class ExpertMover:
    """Every rank of a group has one, and makes the same calls between the same steps.

    load        reads one expert; called in a thread of its own
    placements  of the experts of each layer; changed at each switch
    pacer       bounds what `load` does next to a step; None: nothing does
    rank        this one in the placements; None: its number in the group
    layers      of the model that the decoder has, which it and `load` count from 0; None: all
    """

    def __init__(
        self,
        decoder: PlacesExperts,
        load: LoadExpert,
        communicator: Communicator,
        placements: Placements,
        pacer: StepPacer | None = None,
        rank: int | None = None,
        layers: range | None = None,
    ) -> None:
        self.placements, self._pacer = dict(placements), pacer
        self._decoder, self._load, self._communicator = decoder, load, communicator
        self._rank, self._layers = communicator.rank if rank is None else rank, layers
        self._change: ExpertChange | None = None
        self._loaded: dict[int, Any] = {}
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Run a step within the block, next to which a bounded part of the experts is loaded."""
        if self._pacer is not None:
            self._pacer.begin_step()
        try:
            yield
        finally:
            if self._pacer is not None:
                self._pacer.end_step()

    def prepare(self, change: ExpertChange) -> None:
        """Begin to load the experts that this rank gets."""
        if self._change is not None:
            raise InvariantError(f"experts of layer {self._change.layer} are being moved already")
        self._change, self._loaded, self._error = change, {}, None
        layer = self._own_layer(change)
        wanted = [move.new for move in change.moves if move.rank == self._rank]
        if wanted and layer is not None:
            thread = threading.Thread(target=self._load_all, args=(layer, wanted), name="quire-load-experts")
            thread.daemon = True  # an engine that ends does not wait for it
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread for it: the next call of switch reports it
                logger.error("no expert of layer %d can be loaded: %s", layer, error)
                self._error = str(error)
            else:
                self._thread = thread

    def _own_layer(self, change: ExpertChange) -> int | None:
        """Return which layer of the decoder changes; None: it has another part of the model."""
        if self._layers is None:
            return change.layer
        return change.layer - self._layers.start if change.layer in self._layers else None

    def _load_all(self, layer: int, experts: list[int]) -> None:
        try:
            with short_switch_interval():
                for expert in experts:
                    self._loaded[expert] = self._load(layer, expert)
        except Exception as error:  # reported by the next call of switch; the rank goes on with the experts that it has
            logger.exception("an expert of layer %d cannot be loaded", layer)
            self._error = f"{type(error).__name__}: {error}"

    @property
    def state(self) -> LoadState:
        """How far this rank is."""
        if self._thread is not None and self._thread.is_alive():
            return LoadState.LOADING
        return LoadState.READY if self._error is None else LoadState.FAILED

    def switch(self) -> LoadState:
        """Compare all ranks; where all are ready, switch to the new placement of the layer, where one has failed, give it up.
        Returns the state of the group."""
        change = self._change
        if change is None:
            raise InvariantError("no experts are being moved")
        found = LoadState(least_of(self._communicator, int(self.state)))
        if found is LoadState.LOADING:
            return found
        if found is LoadState.READY:
            placement = apply_moves(self.placements[change.layer], change.moves)
            layer = self._own_layer(change)
            if layer is not None:
                self._decoder.place_experts(layer, self._loaded, placement, self._rank)
            self.placements[change.layer] = placement
        elif self._thread is not None:
            self._thread.join()
        self._change, self._loaded, self._thread = None, {}, None
        return found
