"""load_native: the switches of the environment, what is allowed, what is logged."""

import importlib
import logging

import pytest

from quire.base.errors import ConfigError
from quire.kernels.native import load_native


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    for name in ("QUIRE_NATIVE", "QUIRE_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    load_native.cache_clear()
    yield
    load_native.cache_clear()


def test_nothing_is_loaded_when_turned_off(monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_NATIVE", "0")
    with caplog.at_level(logging.DEBUG, logger="quire"):
        assert load_native() is None
        assert load_native() is None
    assert [record.message for record in caplog.records] == ["native CPU kernels are turned off by QUIRE_NATIVE=0"]


def test_unknown_switch_is_refused(monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", "yes")
    with pytest.raises(ConfigError, match="QUIRE_NATIVE must be 0 .* or 1 .*, got 'yes'"):
        load_native()


def test_absent_extension_is_no_error(monkeypatch, caplog):
    def fail(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with caplog.at_level(logging.DEBUG, logger="quire"):
        assert load_native() is None
    assert "were not built" in caplog.text


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'numpy'", name="numpy"), ImportError("libgomp.so.1: not found")], ids=repr
)
def test_broken_extension_is_an_error(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ImportError, match=str(error)):
        load_native()


def test_extension_is_loaded_and_logged_once(caplog):
    native = pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
    with caplog.at_level(logging.DEBUG, logger="quire"):
        assert load_native() is native
        assert load_native() is native
    assert [record.message for record in caplog.records] == [f"native CPU kernels: {native.isa()}"]


def test_unknown_instruction_set_is_refused(monkeypatch):
    pytest.importorskip("quire.kernels.cpu._native", reason="the native kernels are not built")
    monkeypatch.setenv("QUIRE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="QUIRE_CPU_ISA must be one of portable.*, got 'sse9'"):
        load_native()
