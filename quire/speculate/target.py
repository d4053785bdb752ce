"""Target: a model and its cache, for proposers that draft with them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kv.pool import KvPool
from quire.model.build import Model


@dataclass(frozen=True, slots=True)
class Target:
    """A model, usually the one that verifies, and its cache."""

    model: Model
    kv: KvPool
