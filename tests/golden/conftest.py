"""Checkpoints of the golden tests, each made once in a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the golden tests compare with transformers")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Models this small are slower on several threads, far slower where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function (case, style) -> folder of its checkpoint."""
    from make_checkpoints import copy_as_v4, make_checkpoint

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
