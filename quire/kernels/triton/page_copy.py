"""Copy whole KV blocks between the memory of a pool and pages, which have all arrays of a block one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.base.errors import InvariantError
from quire.kernels.triton.launching import Launch, check_contiguous
from quire.kernels.triton.page_copy_kernels import copy_words

WORD_BYTES = 4
"""What is copied at a time: arrays begin and end on multiples of it, in the pool and in a page."""
_CHUNK_WORDS = 4096
"""Of one array and block, for one program."""
_WIDE_WORDS = 4
"""That a thread copies at a time, where all arrays consist of so many."""


class PageLayout(NamedTuple):
    """Where the arrays of a block are: A arrays, all numbers in words of WORD_BYTES.

    starts   [A] i64 of each array in the memory of the pool
    sizes    [A] i64 of a block of it
    offsets  [A] i64 of its block in a page
    most     the largest of sizes
    is_wide  all numbers are multiples of _WIDE_WORDS
    """

    starts: Tensor
    sizes: Tensor
    offsets: Tensor
    most: int
    is_wide: bool

    @classmethod
    def of(cls, starts_bytes: Sequence[int], sizes_bytes: Sequence[int], device: torch.device) -> PageLayout:
        """Return the layout of a page that has the arrays in this order. Raises InvariantError for parts of words."""
        if any(number % WORD_BYTES for number in (*starts_bytes, *sizes_bytes)):
            raise InvariantError(f"the arrays of a page have to consist of words of {WORD_BYTES} bytes, got {sizes_bytes}")
        starts, sizes = (torch.tensor(numbers, dtype=torch.int64) // WORD_BYTES for numbers in (starts_bytes, sizes_bytes))
        offsets = sizes.cumsum(0) - sizes
        is_wide = not bool((torch.cat([starts, sizes]) % _WIDE_WORDS).any())
        most = int(sizes.max()) if len(sizes) else 0
        return cls(starts.to(device), sizes.to(device), offsets.to(device), most, is_wide)


def copy_pages_launch(
    memory: Tensor, pages: Tensor, layout: PageLayout, blocks: Tensor, places: Tensor, to_pages: bool
) -> Launch:
    """Return the launch that copies blocks to pages, or pages to blocks, bit for bit.

    memory  u8, of the pool; pages [P, page bytes] u8
    blocks  [N] i64, of the pool; places [N] i64, of pages; those that are written are all different
    """
    num_moves = len(blocks)
    check_contiguous("pages", pages, (None, None), torch.uint8)
    check_contiguous("blocks", blocks, (None,), torch.int64)
    check_contiguous("places", places, (num_moves,), torch.int64)
    arguments = {
        "memory_ptr": memory.view(torch.int32),
        "pages_ptr": pages.view(torch.int32),
        "blocks_ptr": blocks,
        "places_ptr": places,
        "starts_ptr": layout.starts,
        "sizes_ptr": layout.sizes,
        "offsets_ptr": layout.offsets,
    }
    constants = {
        "PAGE_WORDS": pages.shape[1] // WORD_BYTES,
        "TO_PAGES": to_pages,
        "MULTIPLE": _WIDE_WORDS if layout.is_wide else 1,
        "CHUNK": min(_CHUNK_WORDS, triton.next_power_of_2(max(1, layout.most))),
    }
    grid = (num_moves, len(layout.sizes), -(-layout.most // _CHUNK_WORDS))
    return Launch(copy_words, grid, arguments, constants, num_warps=8, num_stages=1)
