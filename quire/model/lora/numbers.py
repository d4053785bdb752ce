"""AdapterNumbers: the small numbers by which kernels know the adapters that are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvariantError
from quire.model.lora.adapter import Adapter

NO_ADAPTER = -1
"""The number of rows that use the base model."""


class AdapterHolder(Protocol):
    """The adapters that a decoder can run, by their keys."""

    def load(self, adapter: Adapter) -> None:
        """Add an adapter, unless it is there."""
        ...

    def unload(self, key: str) -> None:
        """Remove an adapter that no sequence uses any more."""
        ...


class AdapterNumbers:
    """Numbers from 0 on; a free one is given again."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._numbers

    @property
    def next_number(self) -> int:
        """The lowest free number."""
        taken = set(self._numbers.values())
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def set(self, key: str, number: int) -> None:
        """Give a free number to an adapter."""
        self._numbers[key] = number

    def remove(self, key: str) -> int:
        """Free the number of an adapter, and return it."""
        return self._numbers.pop(key)

    def of_runs(self, keys: Sequence[str] | None, starts: Sequence[int]) -> NDArray[np.int32] | None:
        """Return the number of each token's adapter [T]; None: no token has one.

        keys, starts  see TokenRuns
        """
        if keys is None or not any(keys):
            return None
        numbers = [self._number(key) if key else NO_ADAPTER for key in keys]
        return np.repeat(np.array(numbers, dtype=np.int32), np.diff(starts))

    def of_rows(self, rows: Mapping[str, Tensor] | None, num_tokens: int) -> NDArray[np.int32] | None:
        """As of_runs, given key -> indices of tokens, see AttentionMetadata."""
        if not rows:
            return None
        numbers = np.full(num_tokens, NO_ADAPTER, dtype=np.int32)
        for key, tokens in rows.items():
            numbers[tokens.numpy()] = self._number(key)
        return numbers

    def _number(self, key: str) -> int:
        number = self._numbers.get(key)
        if number is None:
            raise InvariantError(f"a step uses the adapter {key}, which is not loaded")
        return number
