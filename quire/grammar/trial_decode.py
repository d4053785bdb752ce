"""Whether outputs of a grammar can go on for a while: one may be too complex for its masks, which only they show."""

from __future__ import annotations

from typing import cast

import numpy as np

from quire.contracts.constraint import Grammar
from quire.grammar.masks import fill_mask
from quire.grammar.matcher import MaskedMatcher

_NUM_TOKENS = 32
_STRIDES = (7919, 104729)
"""Which of the tokens that are allowed are taken, one output each."""


def can_continue(grammar: Grammar) -> bool:
    """Follow two outputs, each to its end or for some tokens; return whether all masks could be filled."""
    for stride in _STRIDES:
        matcher = cast("MaskedMatcher", grammar.new_matcher())
        words = np.zeros(matcher.end_token_id // 32 + 1, dtype=np.int32)
        for count in range(1, _NUM_TOKENS + 1):
            if fill_mask(matcher, words) is not None:
                return False
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != matcher.end_token_id]
            if len(allowed) == 0 or matcher.advance(int(allowed[stride * count % len(allowed)])) is not None:
                break
            if matcher.is_complete:
                break
    return True
