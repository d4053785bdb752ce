"""What a step attends to, counted token by token."""

import random
from types import SimpleNamespace

import pytest

from quire.engine.scheduling.step_record import describe_plan


def describe(spans, windows):
    sequences = {
        number: SimpleNamespace(
            num_computed_tokens=start,
            num_prompt_tokens=start + 1,
            num_dropped_tokens=0,
            request=SimpleNamespace(request_id=number),
            choice=0,
        )
        for number, (start, _) in enumerate(spans)
    }
    plan = SimpleNamespace(num_scheduled_tokens={number: count for number, (_, count) in enumerate(spans)})
    nothing_before = SimpleNamespace(num_tokens_before=lambda _plan, _sequence_id: 0)
    return describe_plan(SimpleNamespace(sequence=sequences.__getitem__, in_flight=nothing_before), plan, windows)[1]


@pytest.mark.parametrize("window", [None, 1, 2, 7, 100])
def test_attended_tokens_and_pairs_are_those_of_each_new_token(window):
    rng = random.Random(0)
    for _ in range(50):
        spans = [(rng.randrange(20), rng.choice([1, 1, 2, 5, 12])) for _ in range(rng.randrange(4))]
        num_tokens = num_pairs = 0
        for start, count in spans:
            seen = [set(range(0 if window is None else max(0, at - window + 1), at + 1)) for at in range(start, start + count)]
            num_tokens += len(set().union(*seen))
            num_pairs += sum(map(len, seen))
        assert describe(spans, (window,)) == [(num_tokens, num_pairs)]


def test_each_window_is_counted_apart():
    assert describe([(9, 1), (0, 4)], (None, 4)) == [(14, 20), (8, 14)]
