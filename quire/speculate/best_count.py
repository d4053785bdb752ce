"""How many drafts make tokens fastest, given how likely each is to be accepted and what steps take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_GAIN_TO_CHANGE = 1.01


def best_count(num_sequences: int, ranked: Sequence[float], ratio: Callable[[int], float], kept: int) -> int:
    """Return the number of drafts in all that makes tokens fastest; `kept`, that of before, where no other is better by much.

    ranked  the probability that each draft is accepted, the likeliest first
    ratio   plain steps that one with so many drafts takes
    """
    best, best_rate, kept_rate = 0, 0.0, 0.0
    gained, step = 0.0, 1
    for count, share in enumerate(ranked, start=1):
        gained += share
        if count != step and count != len(ranked) and count != kept:
            continue
        step = max(count + 1, count * 5 // 4)
        rate = (1.0 + gained / num_sequences) / ratio(count)
        if count == kept:
            kept_rate = rate
        if rate > best_rate:
            best, best_rate = count, rate
    return kept if kept_rate * _GAIN_TO_CHANGE >= best_rate else best
