"""Device code of logits processors; see processors.py for the words."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_COUNT = (1 << 20) - 1
"""The lowest 20 bits of a word: how often the token is in the output."""
IN_PROMPT, FORBIDDEN, ENDING, BIAS_SHIFT = 1 << 20, 1 << 21, 1 << 22, 23
"""Bits of a word: the token is in the prompt; it is never allowed; it is allowed only from `first_endings` on; and the lowest
of nine bits with the index of its bias."""
NUM_BIASES = 1 << 9
"""Biases of a batch slot; the first is 0."""
_COUNT, _PROMPT = tl.constexpr(MAX_COUNT), tl.constexpr(IN_PROMPT)
_FORBIDDEN, _ENDING = tl.constexpr(FORBIDDEN), tl.constexpr(ENDING)
_SHIFT, _BIASES = tl.constexpr(BIAS_SHIFT), tl.constexpr(NUM_BIASES)


@triton.jit
def process_rows(
    out_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    words_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    is_processed_ptr: tl.tensor,
    repetitions_ptr: tl.tensor,
    inverse_repetitions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    presences_ptr: tl.tensor,
    first_endings_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write block program_id(1) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    raw = tl.load(logits_ptr + row * logits_stride + tokens, mask=inside, other=0.0).to(tl.float32)
    found = raw
    if tl.load(is_processed_ptr + row) != 0:
        slot = tl.load(rows_ptr + row).to(tl.int64)
        words = tl.load(words_ptr + slot * vocab_size + tokens, mask=inside, other=0)
        found = raw + tl.load(biases_ptr + slot * _BIASES + ((words >> _SHIFT) & (_BIASES - 1)))
        repetition, inverse = tl.load(repetitions_ptr + row), tl.load(inverse_repetitions_ptr + row)
        is_known = (words & (_COUNT | _PROMPT)) != 0
        found = tl.where(is_known, tl.where(found > 0, found * inverse, found * repetition), found)
        counts = (words & _COUNT).to(tl.float32)
        penalties = counts * tl.load(frequencies_ptr + row) + tl.load(presences_ptr + row)
        found = tl.where(counts > 0, found - penalties, found)
        is_early = tl.load(positions_ptr + row) < tl.load(first_endings_ptr + row)
        forbidding = tl.where(is_early, _FORBIDDEN | _ENDING, _FORBIDDEN)
        found = tl.where((words & forbidding) != 0, float("-inf"), found)
        found = tl.where((raw != raw) | (raw == float("inf")), raw, found)
    tl.store(out_ptr + row * vocab_size + tokens, found, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def count_ids(
    words_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    is_processed_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_rows
    ids = tl.load(ids_ptr + places, mask=inside, other=-1)
    is_counted = inside & (ids >= 0) & (tl.load(is_processed_ptr + places, mask=inside, other=0) != 0)
    slots = tl.load(rows_ptr + places, mask=inside, other=0).to(tl.int64)
    words = words_ptr + slots * vocab_size + ids
    tl.store(words, tl.load(words, mask=is_counted, other=0) + 1, mask=is_counted)
