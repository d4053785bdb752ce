"""Checkpoints of the golden tests, each made once in a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the golden tests compare with transformers")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function (case, style) -> folder of its checkpoint."""
    from tests.golden.make_checkpoints import copy_as_v4, make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")

    def find(case: str, style: str = "v5") -> Path:
        folder = root / f"{case}-{style}"
        if not folder.exists():
            if style == "v5":
                make_checkpoint(case, folder)
            else:
                copy_as_v4(find(case), folder)
        return folder

    return find
