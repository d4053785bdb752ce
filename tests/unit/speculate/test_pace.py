"""The pace: in a world with known costs and acceptance it drafts where that pays, and next to never where it does not."""

import random

import pytest

from quire.speculate.pace import Pace
from quire.speculate.records import AcceptanceRecord


def live(num_sequences, share, cost_per_token, num_steps=4000, max_tokens=5, seed=0):
    """Return (tokens, seconds, drafts) of the last half of a life; a step of T tokens takes 1 + cost * (T - sequences)."""
    rng = random.Random(seed)
    pace = Pace(max_tokens)
    records = [AcceptanceRecord(max_tokens, 0.95) for _ in range(num_sequences)]
    counts = [0] * num_sequences
    tokens, seconds, drafts = 0, 0.0, 0
    for step in range(num_steps):
        gained = num_sequences
        for record, count in zip(records, counts, strict=True):
            if count:
                accepted = next((depth for depth in range(count) if rng.random() >= share), count)
                pace.note_verified(record, count, range(accepted))
                gained += accepted
        duration = 1.0 + cost_per_token * sum(counts) / num_sequences
        pace.note_step(num_sequences, sum(counts), duration * rng.uniform(0.95, 1.05))
        if step >= num_steps // 2:
            tokens, seconds, drafts = tokens + gained, seconds + duration, drafts + sum(counts)
        counts = [0] * num_sequences if pace.is_asleep else pace.choose([(record, max_tokens) for record in records])
    return tokens, seconds, drafts


@pytest.mark.parametrize("num_sequences", [1, 4, 32])
@pytest.mark.parametrize(("share", "cost"), [(0.0, 0.2), (0.0, 1.0), (0.3, 1.0), (0.8, 1.0)])
def test_what_does_not_pay_costs_next_to_nothing(num_sequences, share, cost):
    tokens, seconds, _ = live(num_sequences, share, cost)
    assert tokens / seconds > 0.98 * num_sequences


@pytest.mark.parametrize("num_sequences", [1, 4, 32])
@pytest.mark.parametrize(("share", "cost"), [(0.95, 0.05), (0.8, 0.1), (0.6, 0.2)])
def test_what_pays_is_nearly_fully_used(num_sequences, share, cost):
    tokens, seconds, _ = live(num_sequences, share, cost)
    best = max(sum(share**depth for depth in range(count + 1)) / (1 + cost * count) for count in range(6))
    assert tokens / seconds > 0.93 * best * num_sequences


def test_sequences_that_accept_get_the_drafts_when_others_do_not():
    rng = random.Random(1)
    pace = Pace(4)
    records = [AcceptanceRecord(4, 0.95) for _ in range(8)]
    counts, totals = [0] * 8, [0] * 8
    for step in range(600):
        for index, (record, count) in enumerate(zip(records, counts, strict=True)):
            if count:
                pace.note_verified(record, count, range(count if index < 4 else 0))
        pace.note_step(8, sum(counts), 1.0 + 0.05 * sum(counts) + rng.uniform(0, 0.01))
        counts = [0] * 8 if pace.is_asleep else pace.choose([(record, 4) for record in records])
        if step >= 300:
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
    assert min(totals[:4]) > 800
    assert max(totals[4:]) < 100


def test_nothing_is_drafted_before_it_is_known_what_a_plain_step_costs():
    pace = Pace(4)
    offers = [(AcceptanceRecord(4, 0.95), 4)]
    assert pace.choose(offers) == [0]
    pace.note_step(1, 0, 1.0)
    pace.note_step(1, 0, 1.0)
    assert pace.choose(offers) == [4]


@pytest.mark.parametrize("delay", [0.0, 20.0])
def test_delays_of_the_first_drafted_step_do_not_end_what_pays(delay):
    rng = random.Random(4)
    pace, record = Pace(4), AcceptanceRecord(4, 0.95)
    counts, num_drafted, was_drafting = [0], 0, False
    for _ in range(400):
        if counts[0]:
            accepted = next((depth for depth in range(counts[0]) if rng.random() >= 0.75), counts[0])
            pace.note_verified(record, counts[0], tuple(range(accepted)))
            num_drafted += 1
        # As long as nothing is drafted, the draft model falls behind.
        pace.note_step(1, counts[0], 1.0 + 0.1 * counts[0] + delay * (counts[0] > 0 and not was_drafting))
        was_drafting = counts[0] > 0
        counts = [0] if pace.is_asleep else pace.choose([(record, 4)])
    assert num_drafted > 360
