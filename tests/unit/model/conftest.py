"""Folders with a config.json and whatever else a test asks for."""

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 101}


@pytest.fixture(scope="session")
def shared():
    """The folder of shared test data."""
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data is not at {SHARED}")
    return SHARED


@pytest.fixture
def write_config(tmp_path):
    """Return a function that writes config.json (of a small model, with changes) and returns its folder."""

    def write(model_type, generation=None, **changes):
        values = {"model_type": model_type, **SMALL, **changes}
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write
