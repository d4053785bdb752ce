"""The figures of constrained decoding: what is forced has no pass of its own, and changes no token."""

import contextlib
import json

import pytest

pytest.importorskip("llguidance")

from quire.base.errors import ConfigError
from quire.bench.constrained import SCHEMA, ConstrainedTrial, measure_constrained
from quire.contracts.config import EngineConfig


def trial(**options):
    defaults = {
        "schema": SCHEMA,
        "batch_sizes": (1, 2),
        "prompts": ("a b c", "d e f"),
        "max_tokens": 60,
        "temperature": 1.0,
        "num_rounds": 2,
        "is_compact": True,
    }
    return ConstrainedTrial(**{**defaults, **options})


def test_forced_tokens_are_counted_where_they_are_drafted(tiny_model):
    record = measure_constrained(EngineConfig(model=str(tiny_model), num_kv_blocks=64), trial())
    by_way = {(line.way, line.batch_size): line for line in record.lines}
    assert len(by_way) == 6
    for size in (1, 2):
        free, plain, drafted = (by_way[way, size] for way in ("free", "constrained", "constrained, forced drafted"))
        assert free.forced_share == plain.forced_share == 0 < drafted.forced_share < 1
        assert plain.characters_per_token == drafted.characters_per_token > 0
        assert all(line.us_per_token > 0 for line in (free, plain, drafted))
        assert free.steps is None
        assert all(
            0 < value < 100 for value in (*plain.steps.run, *plain.steps.clock, *plain.steps.thread, *plain.steps.process)
        )
        assert plain.steps.clock[0] <= plain.steps.clock[1] <= plain.steps.clock[2]
    assert "forced drafted" in record.describe()
    assert "constrained, batch 2: " in record.describe()
    assert json.loads(record.to_json())["model"] == str(tiny_model)


def test_progress_counts_every_run(tiny_model, monkeypatch):
    counts = []

    class Bar(contextlib.nullcontext):
        def update(self, count=1):
            counts.append(count)

        def set_description(self, _):
            pass

        def __enter__(self):
            return self

    monkeypatch.setattr("quire.bench.constrained.progress_bar", lambda total, unit, is_shown: counts.append(-total) or Bar())
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=64)
    measure_constrained(config, trial(batch_sizes=(1,), max_tokens=20, num_rounds=1), show_progress=True)
    assert sum(counts) == 0 < len(counts)


def test_a_trial_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="2 prompts, too few for a batch of 3"):
        trial(batch_sizes=(3,))
    with pytest.raises(ConfigError, match="at least 1"):
        trial(max_tokens=0)
