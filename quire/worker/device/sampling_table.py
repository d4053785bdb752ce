"""SamplingTable: how the sequences of each line are sampled, as arrays from which a step takes its rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.triton.sampling import RowOptions
from quire.sampling.row_state import SamplingRow
from quire.worker.device.host_step import Sampling
from quire.worker.device.staging import Part

_COLUMNS: dict[str, torch.dtype] = {
    "inverse_temperatures": torch.float32,
    "is_greedy": torch.int32,
    "top_ks": torch.int32,
    "top_ps": torch.float64,
    "log_min_ps": torch.float32,
    "seeds": torch.int64,
}


class SamplingTable:
    """One line for each of num_lines sequences; those that were never set sample greedily, as padding does.

    num_changes  grows with every change
    """

    def __init__(self, num_lines: int, vocab_size: int) -> None:
        self.num_changes = 0
        self._vocab_size = vocab_size
        self._arrays: dict[str, NDArray[np.generic]] = {
            "inverse_temperatures": np.ones(num_lines, np.float32),
            "is_greedy": np.ones(num_lines, np.int32),
            "top_ks": np.zeros(num_lines, np.int32),
            "top_ps": np.ones(num_lines, np.float64),
            "log_min_ps": np.full(num_lines, -np.inf, np.float32),
            "seeds": np.zeros(num_lines, np.int64),
        }
        self._has_cuts = np.zeros(num_lines, np.bool_)
        self._is_plain = np.ones(num_lines, np.bool_)

    def set(self, line: int, row: SamplingRow, is_draft: bool = False) -> None:
        """Take over how a sequence is sampled; that does not change while it lives.

        is_draft  drafts of it are drawn, as draw_drafts does: with its noise, but without what changes logits
        """
        params, arrays = row.params, self._arrays
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        is_drawn = row.is_greedy or params.typical_p >= 1
        is_plain = is_draft or (is_drawn and not row.edits_logits and row.matcher is None and not row.needs_logprob)
        is_greedy = row.is_greedy or not is_plain  # what is quickest, where nobody asks for the result
        arrays["inverse_temperatures"][line] = row.inverse_temperature
        arrays["is_greedy"][line] = is_greedy
        arrays["top_ks"][line] = top_k
        arrays["top_ps"][line] = params.top_p
        arrays["log_min_ps"][line] = row.log_min_p
        arrays["seeds"][line] = np.uint64(row.seed & (1 << 64) - 1).astype(np.int64)
        self._has_cuts[line] = not is_greedy and (top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self._is_plain[line] = is_plain
        self.num_changes += 1

    def sampling_of(self, lines: NDArray[np.int32]) -> Sampling:
        """Return how the device finds the next tokens of these sequences, all of them together."""
        return "cuts" if self._has_cuts[lines].any() else "plain"

    def left_to_host(self, lines: NDArray[np.int32]) -> list[int]:
        """Return which of these sequences, by index, need the host's sampler; what the device finds for them is nothing."""
        is_plain = self._is_plain[lines]
        return [] if is_plain.all() else np.flatnonzero(~is_plain).tolist()

    def fill(self, host: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the options of the lines host["sampled_rows"] into arrays that `option_parts` names."""
        lines = host["sampled_rows"]
        for name, column in self._arrays.items():
            np.take(column, lines, out=host[name])


def option_parts(num_rows: int) -> list[Part]:
    """Return the arrays that say how num_rows tokens are sampled."""
    own = [Part("sampled_rows", torch.int32, num_rows), Part("sample_positions", torch.int64, num_rows)]
    return [*(Part(name, dtype, num_rows) for name, dtype in _COLUMNS.items()), *own]


def row_options(device: Mapping[str, Tensor]) -> RowOptions:
    """Return the arrays of `option_parts` as the sampler takes them."""
    return RowOptions(**{name: device[name] for name in _COLUMNS}, positions=device["sample_positions"])
