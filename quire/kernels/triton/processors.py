"""Logits processors on the device: a word for each token of each batch slot says what becomes of its logit.

A word, i32, holds how often the token is in the output, and what the request says of it; see the constants. Words are set when
a sequence starts. The device counts each token that it samples, so that the next step does not need the host. Results have the
bits of sampling/processors.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.launching import Launch, check_contiguous, check_tensor
from quire.kernels.triton.processors_kernels import NUM_BIASES, count_ids, process_rows

_BLOCK, _ROW_BLOCK = 2048, 256


class ProcessorTables(NamedTuple):
    """What is kept for each of N batch slots: words [N, V] i32, biases [N, NUM_BIASES] f32."""

    words: Tensor
    biases: Tensor

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, device: torch.device) -> ProcessorTables:
        """Return tables that change nothing."""
        words = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        return cls(words, torch.zeros(num_slots, NUM_BIASES, dtype=torch.float32, device=device))


class ProcessorOptions(NamedTuple):
    """Processors of [R] rows, on the device.

    rows                 [R] i32 batch slots; what is counted of a processed one that occurs twice is not defined
    is_processed         [R] i32, 0: the logits stay as they are, and nothing is counted
    repetitions          [R] f32 repetition penalties, and inverse_repetitions [R] f32
    frequencies          [R] f32 frequency penalties; presences [R] f32
    first_endings        [R] i64 positions from which on ENDING tokens are allowed
    positions            [R] i64 of the tokens that will be sampled
    """

    rows: Tensor
    is_processed: Tensor
    repetitions: Tensor
    inverse_repetitions: Tensor
    frequencies: Tensor
    presences: Tensor
    first_endings: Tensor
    positions: Tensor


def process_launch(out: Tensor, logits: Tensor, tables: ProcessorTables, options: ProcessorOptions) -> Launch:
    """Return the launch that writes the processed logits of rows.

    A NaN or +inf stays what it is, so that the sampler sees it.

    out     [R, V] f32
    logits  [R, V] float, with contiguous rows
    """
    num_rows, vocab_size = logits.shape
    check_tensor("logits", logits, (None, None), torch.float32, torch.bfloat16, torch.float16)
    check_contiguous("out", out, (num_rows, vocab_size), torch.float32)
    check_contiguous("words", tables.words, (None, vocab_size), torch.int32)
    check_contiguous("biases", tables.biases, (len(tables.words), NUM_BIASES), torch.float32)
    dtypes = (torch.int32,) * 2 + (torch.float32,) * 4 + (torch.int64,) * 2
    for name, column, dtype in zip(options._fields, options, dtypes, strict=True):
        check_contiguous(name, column, (num_rows,), dtype)
    arguments = {
        "out_ptr": out,
        "logits_ptr": logits,
        "words_ptr": tables.words,
        "biases_ptr": tables.biases,
        **{f"{name}_ptr": column for name, column in options._asdict().items()},
        "vocab_size": vocab_size,
        "logits_stride": logits.stride(0),
    }
    return Launch(process_rows, (num_rows, triton.cdiv(vocab_size, _BLOCK)), arguments, {"BLOCK": _BLOCK}, 8, 1, is_fused=False)


def count_launch(tables: ProcessorTables, token_ids: Tensor, options: ProcessorOptions) -> Launch:
    """Return the launch that counts token_ids [R] i64 in the words of the processed rows; negative ids are skipped."""
    num_rows, (num_slots, vocab_size) = len(token_ids), tables.words.shape
    check_contiguous("token_ids", token_ids, (num_rows,), torch.int64)
    if len(options.rows) != num_rows or num_slots < 1:
        raise InvariantError(f"{num_rows} tokens are counted of {len(options.rows)} rows and {num_slots} batch slots")
    arguments = {
        "words_ptr": tables.words,
        "ids_ptr": token_ids,
        "rows_ptr": options.rows,
        "is_processed_ptr": options.is_processed,
        "num_rows": num_rows,
        "vocab_size": vocab_size,
    }
    return Launch(count_ids, (-(-num_rows // _ROW_BLOCK),), arguments, {"BLOCK": _ROW_BLOCK}, 4, 1)
