"""MaskFiller: the masks of a step's constrained sequences, filled while the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.contracts.constraint import GrammarMatcher
from quire.grammar.matcher import MaskedMatcher, MaskSource


@dataclass(frozen=True, slots=True)
class Masks:
    """What every matcher allows next.

    words   numpy [num_matchers, at least ceil(vocabulary / 32)] i32: a bit per token, the lowest first
    errors  why a matcher cannot go on; its mask then means nothing
    """

    words: Any
    errors: list[str | None]


class MaskFiller:
    """Fills masks in a thread of its own, which takes its time while the caller computes. Not thread-safe."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def start(self, matchers: Sequence[GrammarMatcher], ending_ids: Sequence[Sequence[int]]) -> Future[Masks]:
        """Begin to fill; no matcher may be advanced before the result is there.

        ending_ids  per matcher the tokens that are allowed where the output may end
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        return self._thread.submit(fill_masks, matchers, ending_ids)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def fill_masks(matchers: Sequence[GrammarMatcher], ending_ids: Sequence[Sequence[int]]) -> Masks:
    """Return the masks of some matchers; see MaskFiller.start."""
    masked = cast("Sequence[MaskedMatcher]", matchers)
    groups: dict[int, tuple[MaskSource, list[int]]] = {}
    for index, matcher in enumerate(masked):
        groups.setdefault(id(matcher.source), (matcher.source, []))[1].append(index)
    num_words = max(matcher.end_token_id for matcher in masked) // 32 + 1
    words = np.zeros((len(masked), num_words), dtype=np.int32)
    errors: list[str | None] = [None] * len(masked)
    for source, indices in groups.values():
        part = words if len(groups) == 1 else np.zeros((len(indices), num_words), dtype=np.int32)
        found = source.fill([masked[index] for index in indices], part)
        if part is not words:
            words[indices] = part
        for index, error in zip(indices, found, strict=True):
            errors[index] = error
    _open_endings(words, masked, ending_ids)
    return Masks(words, errors)


def _open_endings(words: Any, matchers: Sequence[MaskedMatcher], ending_ids: Sequence[Sequence[int]]) -> None:
    bits = words.view(np.uint32)
    for row, matcher in enumerate(matchers):
        word, bit = divmod(matcher.end_token_id, 32)
        if bits[row, word] >> bit & 1:
            bits[row, word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
            for token_id in ending_ids[row]:
                bits[row, token_id // 32] |= np.uint32(1 << token_id % 32)
