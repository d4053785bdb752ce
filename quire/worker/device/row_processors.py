"""SlotProcessors: the logits processors of a sequence as numbers for the device; ProcessorUpdates: those of new sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.triton.logprobs import MAX_TOP
from quire.kernels.triton.processors import ProcessorTables
from quire.kernels.triton.processors_kernels import BIAS_SHIFT, ENDING, FORBIDDEN, IN_PROMPT, MAX_COUNT, NUM_BIASES
from quire.sampling.row_state import SamplingRow
from quire.worker.device.staging import Part

MAX_WORDS = 1 << 14
"""Words that one message has at most; a sequence may have as many as tokens."""

PROCESSOR_COLUMNS: dict[str, torch.dtype] = {
    "is_processed": torch.int32,
    "repetitions": torch.float32,
    "inverse_repetitions": torch.float32,
    "frequencies": torch.float32,
    "presences": torch.float32,
    "first_endings": torch.int64,
    "num_tops": torch.int32,
}
"""The options of a row of a step; see ProcessorOptions and logprob_launches."""

NO_PROCESSORS: Mapping[str, int | float] = {
    "is_processed": 0,
    "repetitions": 1.0,
    "inverse_repetitions": 1.0,
    "frequencies": 0.0,
    "presences": 0.0,
    "first_endings": 0,
    "num_tops": -1,
}


def is_sampled_on_device(row: SamplingRow) -> bool:
    """Return whether the device's sampler finds the tokens of a row, with processors and log probabilities."""
    return row.matcher is None and _fits_sampler(row)


def is_masked_on_device(row: SamplingRow) -> bool:
    """Return whether the device's sampler finds the tokens of a row with a constraint, once it gets the token masks."""
    return row.matcher is not None and _fits_sampler(row) and not (row.needs_logprob and row.lists_allowed)


def _fits_sampler(row: SamplingRow) -> bool:
    if not (row.is_greedy or row.params.typical_p >= 1):
        return False
    num_values = 0 if row.bias_values is None else len(set(row.bias_values.tolist()))
    return num_values < NUM_BIASES and 0 <= (row.params.logprobs or 0) <= MAX_TOP


class SlotProcessors(NamedTuple):
    """What the tables and columns of a batch slot hold for a sequence.

    fill              word of all tokens but token_ids
    token_ids, words  [N] i64 distinct ones, [N] i32
    biases            [B] f32, the first is 0; empty: none is used
    columns           see PROCESSOR_COLUMNS
    """

    fill: int
    token_ids: NDArray[np.int64]
    words: NDArray[np.int32]
    biases: NDArray[np.float32]
    columns: Mapping[str, int | float]

    @classmethod
    def of(cls, row: SamplingRow) -> SlotProcessors:
        """Return the processors of a row with the tokens that it has."""
        vocab_size, params = row.vocab_size, row.params
        fill = 0 if row.allowed_ids is None else FORBIDDEN
        words = np.full(vocab_size, fill, np.int32)
        if row.allowed_ids is not None:
            words[row.allowed_ids.numpy()] = 0
        if row.ending_ids:
            words[row.ending_ids] |= ENDING
        biases = np.zeros(0, np.float32)
        if row.bias_ids is not None and row.bias_values is not None:
            values, indices = np.unique(row.bias_values.numpy(), return_inverse=True)
            biases = np.concatenate((np.zeros(1, np.float32), values))
            words[row.bias_ids.numpy()] |= (indices.astype(np.int32) + 1) << BIAS_SHIFT
        if row.known_counts is not None or row.output_counts is not None:
            words[_inside(row.prompt_token_ids, vocab_size)] |= IN_PROMPT
            token_ids, counts = np.unique(_inside(row.output_token_ids, vocab_size), return_counts=True)
            words[token_ids] += counts.astype(np.int32)
        places = np.flatnonzero(words != fill)
        columns: dict[str, int | float] = {
            "is_processed": int(row.edits_logits),
            "repetitions": row.repetition_penalty,
            "inverse_repetitions": 1.0 / row.repetition_penalty,
            "frequencies": params.frequency_penalty,
            "presences": params.presence_penalty,
            "first_endings": len(row.prompt_token_ids) + params.min_tokens,
            "num_tops": min(params.logprobs or 0, vocab_size) if row.needs_logprob else -1,
        }
        return cls(fill, places, words[places], biases, columns)


def _inside(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    found = np.array(token_ids, np.int64)
    return found[(found >= 0) & (found < vocab_size)]


@dataclass(frozen=True, slots=True)
class ProcessorUpdates:
    """Changes of the tables of batch slots: rows of words that are filled, words and biases at places of the flat tables."""

    rows: NDArray[np.int64]
    fills: NDArray[np.int32]
    word_places: NDArray[np.int64]
    words: NDArray[np.int32]
    bias_places: NDArray[np.int64]
    biases: NDArray[np.float32]

    @classmethod
    def split(cls, slots: Mapping[int, SlotProcessors], vocab_size: int) -> list[ProcessorUpdates]:
        """Return the changes that set batch slots, in order, each with at most MAX_WORDS words."""
        if not slots:
            return []
        keys, own = np.array(list(slots), np.int64), list(slots.values())
        places = np.concatenate([key * vocab_size + one.token_ids for key, one in zip(keys, own, strict=True)])
        words = np.concatenate([one.words for one in own])
        bias_places = np.concatenate(
            [key * NUM_BIASES + np.arange(len(one.biases)) for key, one in zip(keys, own, strict=True)]
        )
        biases = np.concatenate([one.biases for one in own])
        fills = np.array([one.fill for one in own], np.int32)
        first = cls(keys, fills, places[:MAX_WORDS], words[:MAX_WORDS], bias_places, biases)
        starts = range(MAX_WORDS, len(words), MAX_WORDS)
        cuts = [slice(start, start + MAX_WORDS) for start in starts]
        nothing = keys[:0], fills[:0]
        return [first, *(cls(*nothing, places[cut], words[cut], bias_places[:0], biases[:0]) for cut in cuts)]

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of `processor_parts`."""
        return len(self.rows), len(self.words), len(self.biases)

    def fill(self, host: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the arrays of `processor_parts`."""
        for name in _NAMES:
            host[f"processor_{name}"][:] = getattr(self, name)


_NAMES = ("rows", "fills", "word_places", "words", "bias_places", "biases")


def processor_parts(num_rows: int, num_words: int, num_biases: int) -> list[Part]:
    """Return the arrays of changes."""
    dtypes = (torch.int64, torch.int32, torch.int64, torch.int32, torch.int64, torch.float32)
    counts = (num_rows, num_rows, num_words, num_words, num_biases, num_biases)
    return [Part(f"processor_{name}", dtype, count) for name, dtype, count in zip(_NAMES, dtypes, counts, strict=True)]


def update_tables(tables: ProcessorTables, arrays: Mapping[str, torch.Tensor]) -> None:
    """Make changes whose arrays are on the device."""
    rows, fills, word_places, words, bias_places, biases = (arrays[f"processor_{name}"] for name in _NAMES)
    if len(rows):
        tables.words.index_put_((rows,), fills[:, None])
    if len(words):
        tables.words.view(-1).index_copy_(0, word_places, words)
    if len(biases):
        tables.biases.view(-1).index_copy_(0, bias_places, biases)


def fits_tables(max_model_len: int) -> bool:
    """Return whether words can count the tokens of sequences."""
    return max_model_len <= MAX_COUNT
