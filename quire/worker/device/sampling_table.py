"""SamplingTable: how each batch slot is sampled, as arrays from which a step takes its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu.sampling import DrawOptions, SampleStatus
from quire.kernels.triton.sampling import RowOptions, sample_rows
from quire.kernels.triton.sampling import row_options as draw_options
from quire.worker.device.host_step import Sampling
from quire.worker.device.row_processors import NO_PROCESSORS, PROCESSOR_COLUMNS
from quire.worker.device.staging import Part, numpy_type
from quire.worker.step_executor import SlotSampling

_COLUMNS: dict[str, torch.dtype] = {
    "inverse_temperatures": torch.float32,
    "is_greedy": torch.int32,
    "top_ks": torch.int32,
    "top_ps": torch.float64,
    "log_min_ps": torch.float32,
    "seeds": torch.int64,
}


class SamplingTable:
    """The sampling options of num_slots batch slots; those that were never set sample greedily, as padding does.

    num_changes  grows with every change
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_changes = 0
        self._vocab_size = vocab_size
        self._arrays: dict[str, NDArray[np.generic]] = {
            "inverse_temperatures": np.ones(num_slots, np.float32),
            "is_greedy": np.ones(num_slots, np.int32),
            "top_ks": np.zeros(num_slots, np.int32),
            "top_ps": np.ones(num_slots, np.float64),
            "log_min_ps": np.full(num_slots, -np.inf, np.float32),
            "seeds": np.zeros(num_slots, np.int64),
        }
        self._has_cuts, self._is_full = np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.bool_)
        self._processors: dict[str, NDArray[np.generic]] = {
            name: np.full(num_slots, NO_PROCESSORS[name], numpy_type(dtype)) for name, dtype in PROCESSOR_COLUMNS.items()
        }

    def set(self, batch_slot: int, sampling: SlotSampling) -> None:
        """Set how a batch slot is sampled from the next step on."""
        arrays = self._arrays
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        arrays["inverse_temperatures"][batch_slot] = sampling.inverse_temperature
        arrays["is_greedy"][batch_slot] = sampling.is_greedy
        arrays["top_ks"][batch_slot] = top_k
        arrays["top_ps"][batch_slot] = sampling.top_p
        arrays["log_min_ps"][batch_slot] = sampling.log_min_p
        arrays["seeds"][batch_slot] = np.uint64(sampling.seed).astype(np.int64)
        has_cuts = top_k > 0 or sampling.top_p < 1 or sampling.log_min_p > -np.inf
        self._has_cuts[batch_slot] = has_cuts and not sampling.is_greedy
        self._set_processors(batch_slot, NO_PROCESSORS)

    def set_processors(self, batch_slot: int, columns: Mapping[str, int | float]) -> None:
        """Set the PROCESSOR_COLUMNS of a batch slot, after `set`."""
        self._set_processors(batch_slot, columns)
        self._is_full[batch_slot] = True

    def _set_processors(self, batch_slot: int, columns: Mapping[str, int | float]) -> None:
        for name, value in columns.items():
            self._processors[name][batch_slot] = value
        self._is_full[batch_slot] = False
        self.num_changes += 1

    def is_processed(self, batch_slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return of batch slots whether their logits are changed."""
        return self._processors["is_processed"][batch_slots].astype(np.bool_)

    def sampling_of(self, batch_slots: NDArray[np.int32]) -> Sampling:
        """Return how the device finds the next tokens of these batch slots, all of them together."""
        if self._is_full[batch_slots].any():
            return "full"
        return "cuts" if self._has_cuts[batch_slots].any() else "plain"

    def fill(self, host: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the options of the batch slots host["sampled_rows"] into arrays that `option_parts` names."""
        batch_slots = host["sampled_rows"]
        for name, column in self._arrays.items():
            np.take(column, batch_slots, out=host[name])
        if "num_tops" in host:
            for name, column in self._processors.items():
                np.take(column, batch_slots, out=host[name])


def option_parts(num_rows: int, sampling: Sampling) -> list[Part]:
    """Return the arrays that say how num_rows tokens are sampled."""
    columns = _COLUMNS | PROCESSOR_COLUMNS if sampling == "full" else _COLUMNS
    own = [Part("sampled_rows", torch.int32, num_rows), Part("sample_positions", torch.int64, num_rows)]
    return [*(Part(name, dtype, num_rows) for name, dtype in columns.items()), *own]


def row_options(device: Mapping[str, Tensor]) -> RowOptions:
    """Return the arrays of `option_parts` as the sampler takes them."""
    return RowOptions(**{name: device[name] for name in _COLUMNS}, positions=device["sample_positions"])


def draw_on_device(logits: Tensor, row_ids: Sequence[int], options: Sequence[DrawOptions]) -> list[tuple[int, SampleStatus]]:
    """Draw the tokens of some rows of logits where these are; see sampling.sampler.Draw."""
    if not row_ids:
        return []
    rows = logits if len(row_ids) == len(logits) else logits[list(row_ids)]
    has_cuts = any(not row.is_greedy and (row.top_k > 0 or row.top_p < 1 or row.log_min_p > float("-inf")) for row in options)
    found = sample_rows(rows, draw_options(options, logits.shape[1], logits.device), has_cuts)
    return list(zip(found.tokens.tolist(), map(SampleStatus, found.statuses.tolist()), strict=True))
