"""Seed mixing, the registry, and the log of a program that has set up none."""

import os
import subprocess
import sys

import pytest

from quire.base.errors import UnsupportedError
from quire.base.registry import Registry
from quire.base.seeds import mix_seed
from quire.base.suggestions import with_guesses
from quire.base.threads import prefer_short_spins


def test_mixing_is_splitmix64():
    # The first outputs of the reference implementation from state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix_seed(1234567, index) for index in range(4)] == expected
    assert mix_seed(-1, 0) == mix_seed(2**64 - 1, 0)


def test_unknown_name_is_an_error_that_lists_the_known_ones():
    registry: Registry[int] = Registry("fruit")
    registry.register("pear", "apple")(1)
    assert list(registry) == ["apple", "pear"]
    assert registry.get("pear") == 1
    with pytest.raises(UnsupportedError, match=r"fruit 'fig' is not supported; supported: apple, pear"):
        registry.get("fig")
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("apple")(2)


@pytest.mark.parametrize(
    "environment, expected",
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_spin_shortly_unless_the_environment_says_how_to_wait(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    prefer_short_spins()
    assert environment.get("GOMP_SPINCOUNT") == expected


def test_environment_stays_when_torch_is_loaded_and_would_not_see_a_change(monkeypatch):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setitem(sys.modules, "torch", sys)
    prefer_short_spins()
    assert environment == {}


@pytest.mark.slow
def test_how_threads_wait_is_settled_when_quire_loads_torch():
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os; from quire import LLM; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "5000"


@pytest.mark.parametrize("setup, is_shown", [("", True), ("logging.basicConfig(level='WARNING')", False)])
def test_log_is_shown_only_where_the_program_has_set_up_none(setup, is_shown):
    code = f"import logging\n{setup}\nfrom quire.base.logging import *\nshow_log()\nget_logger('quire.x').info('the plan')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("the plan" in done.stderr) == is_shown


def test_unknown_names_stand_beside_the_known_ones_that_are_like_them():
    known = ("speculative_config", "max_model_len", "seed")
    assert with_guesses(["max_modle_len"], known) == "max_modle_len (did you mean max_model_len?)"
    assert with_guesses(["speculative", "x"], known) == "speculative, x (did you mean speculative_config?)"
    assert with_guesses(["x", "y"], known) == "x, y"
