"""Shared fixtures, and what all tests run with: one thread, as two that spin against other processes are far slower."""

import gc
import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for two threads they wait as an engine's do: see prefer_short_spins, which is too late once torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each client of HTTP reads the certificates that a system trusts, in 35 ms; none here asks further than this machine,
# and one without any trusts nobody.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.join(os.path.dirname(__file__), "no certificates")

import pytest
import torch
from hypothesis import settings

from tests.covering import mark_slow_combinations
from tests.tiny_checkpoint import write_checkpoint

torch.set_num_threads(1)
# The same examples in every run: what fails in one place fails everywhere.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Spare the collector ten thousand tests and the libraries that they import: it would walk through all of it ever again."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    never = set(mark_slow_combinations(items, os.environ.get("QUIRE_TEST_COMBINATIONS") == "all"))
    items[:] = [item for item in items if item not in never]
    config.hook.pytest_deselected(items=list(never))


@pytest.fixture(autouse=True)
def log_as_at_first():
    """Undo what a command of an earlier test has set up."""
    logger = logging.getLogger("quire")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Qwen3 checkpoint with a byte-level tokenizer, in float32."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")


@pytest.fixture(
    scope="session", params=["qwen3", "mistral", "gemma2", "qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)]
)
def tiny_family(request, tmp_path_factory):
    """Random checkpoints that differ in what matters to caching: plain, windowed, alternating windows, experts, sinks."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / request.param, request.param)


@pytest.fixture
def late_runners(monkeypatch):
    """Let engines made in a test have a LateRunner; returns the list of them."""
    from quire.engine import loading
    from tests.late_runner import LateRunner

    build, found = loading.build_runner, []

    def build_late(config):
        runner, report = build(config)
        found.append(LateRunner(runner))
        return found[-1], report

    monkeypatch.setattr(loading, "build_runner", build_late)
    return found
