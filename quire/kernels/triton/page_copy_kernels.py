"""Device code that copies KV blocks to pages and back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_words(
    memory_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    places_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    PAGE_WORDS: tl.constexpr,
    TO_PAGES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy chunk program_id(2) of array program_id(1) in block program_id(0)."""
    move, array = tl.program_id(0), tl.program_id(1)
    size = tl.multiple_of(tl.load(sizes_ptr + array), MULTIPLE)
    start = tl.multiple_of(tl.load(starts_ptr + array), MULTIPLE)
    offset = tl.multiple_of(tl.load(offsets_ptr + array), MULTIPLE)
    words = tl.program_id(2).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    is_there = words < size
    in_memory = memory_ptr + start + tl.load(blocks_ptr + move) * size + words
    in_page = pages_ptr + tl.load(places_ptr + move) * PAGE_WORDS + offset + words
    if TO_PAGES:
        tl.store(in_page, tl.load(in_memory, mask=is_there), mask=is_there)
    else:
        tl.store(in_memory, tl.load(in_page, mask=is_there), mask=is_there)
