"""How many threads may be asked for."""

import os

import pytest

from quire.base.errors import ConfigError
from quire.base.threads import check_num_threads, num_usable_cores


def test_threads_are_as_many_as_the_cores_that_a_pinned_process_has(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert num_usable_cores() == 3
    for value in (None, 1, 3):
        check_num_threads("num_threads", value)
    for value in (0, 4, 1000):
        with pytest.raises(ConfigError, match=f"num_threads must be from 1 to 3, the cores .*, got {value}"):
            check_num_threads("num_threads", value)


def test_all_cores_are_usable_when_the_system_knows_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert num_usable_cores() == 4
