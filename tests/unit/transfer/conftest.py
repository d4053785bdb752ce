"""What all tests of transfers run with."""

import pytest

from quire.transfer import page_client


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch):
    """A busy machine ends no pause, retries in time, and asks for no load beside a transfer, which needs its connection."""
    for name, value in {"_FIRST_PAUSE_S": 10.0, "_RETRY_WITHIN_S": 60.0, "_IDLE_CHECK_S": 60.0}.items():
        monkeypatch.setattr(page_client, name, value)
