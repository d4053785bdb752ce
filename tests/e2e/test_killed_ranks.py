"""Ranks are killed or stopped in random states: the others end soon, and nothing remains."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys

import pytest

from quire.base.environment import environment_with_quire
from quire.kernels.native import load_native
from tests.ranks import assert_nothing_new, left_behind

NUM_ROUNDS = int(os.environ.get("QUIRE_KILL_ROUNDS", "14"))
"""A round takes about a second. 500 for a long run."""


@pytest.mark.slow
@pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")
def test_ranks_killed_in_random_states_end_the_group_and_leave_nothing(tmp_path):
    before = left_behind("/dev/shm")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_rounds", "1000", str(NUM_ROUNDS)],
        env={**environment_with_quire(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == NUM_ROUNDS
    assert [each for each in rounds if each["slowest_s"] is None] == []
    assert {each["signal"] for each in rounds} == {"SIGKILL", "SIGSTOP"}
    states = collections.Counter((each["state"], each["victim"] == 0) for each in rounds)
    assert {state for state, _ in states} == {"loading", "ready", "step", "idle"}
    assert all(states[state, is_leader] for state in ("loading", "step", "idle") for is_leader in (False, True))
    assert set(tmp_path.iterdir()) == set()
    assert_nothing_new(before, "/dev/shm")
