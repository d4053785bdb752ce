"""Sequences, block pool, prefix index and scheduler. No torch."""

from quire.engine.scheduling.events import SequenceStats, SequenceUpdate
from quire.engine.scheduling.invariants import check_invariants
from quire.engine.scheduling.scheduler import Scheduler

__all__ = ["Scheduler", "SequenceStats", "SequenceUpdate", "check_invariants"]
