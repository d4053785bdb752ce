"""The checkpoints that quire brings along, in quire/demo_models."""

from __future__ import annotations

from pathlib import Path

import quire

BUNDLED_FOLDER = Path(quire.__file__).parent / "demo_models"


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizer of a checkpoint: its own, or that of `demo` for bundled ones without one."""
    is_shared = folder.resolve().parent == BUNDLED_FOLDER.resolve() and not (folder / "tokenizer.json").is_file()
    return BUNDLED_FOLDER / "demo" if is_shared else folder
