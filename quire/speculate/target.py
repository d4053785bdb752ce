"""Target: the model that verifies, for who drafts with it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv.pool import KvPool
from quire.model.build import Model


@dataclass(frozen=True, slots=True)
class Target:
    """The model that verifies, and its cache."""

    model: Model
    kv: KvPool
