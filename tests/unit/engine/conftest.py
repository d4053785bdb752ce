"""What all tests of engines run with."""

import pytest

from quire.engine import disk_tier, llm_engine


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch):
    """This machine may be busy: pages of a disk are waited for, also where computing is faster."""
    monkeypatch.setattr(disk_tier, "_MAX_SHARE", 1e9)
    monkeypatch.setattr(disk_tier, "_MIN_WAIT_S", 30.0)
    monkeypatch.setattr(disk_tier, "_CLOSE_S", 60.0)
    monkeypatch.setattr(llm_engine, "_CLOSE_SAVE_S", 60.0)
