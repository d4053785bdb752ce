"""Real tokenizers from shared/data; tests that use them are skipped where it is absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.text.tokenizer import Tokenizer, load_tokenizer

SHARED_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
FOLDERS = {
    "gpt2": "tokenizers/gpt2",
    "qwen3": "tokenizers/qwen3",
    "mistral": "tokenizers/mistral",
    "stories": "checkpoints/stories260K",
}
LOADED: dict[str, Tokenizer] = {}


def shared(path: str) -> Path:
    """Return a path under shared/data, or skip the test."""
    found = SHARED_DATA / path
    if not found.exists():
        pytest.skip(f"{found} is absent")
    return found


@pytest.fixture
def real_tokenizer():
    """Return a function from a name (gpt2, qwen3, mistral, stories, *-files) to a loaded tokenizer."""

    def get(name: str, tmp_path: Path | None = None) -> Tokenizer:
        if name not in LOADED:
            base, _, variant = name.partition("-")
            folder = shared(FOLDERS[base])
            if variant:
                assert tmp_path is not None
                for file in {"model": ["tokenizer.model"], "merges": ["vocab.json", "merges.txt"]}[variant]:
                    (tmp_path / file).symlink_to(folder / file)
                folder = tmp_path
            LOADED[name] = load_tokenizer(folder)
        return LOADED[name]

    return get


@pytest.fixture
def shared_lines():
    """Return a function from a path under shared/data to its JSON lines."""
    return lambda path: [json.loads(line) for line in shared(path).read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture
def shared_path():
    return shared
