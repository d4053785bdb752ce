"""Output of measured figures: to the terminal, and to a file if one is given."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.base.errors import ConfigError


def add_output_option(parser: argparse.ArgumentParser) -> None:
    """Add --output-json, which `check_output` and `report` take."""
    parser.add_argument("--output-json", type=Path, help="also write the figures to this file")


def check_output(path: Path | None, option: str = "--output-json") -> None:
    """Check before a long run that its figures can be written. Raises ConfigError."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{option} {path}: give a file in a folder that exists")


def report(text: str | None, json_text: str, path: Path | None) -> int:
    """Print the figures for people, if that was not done, write them as JSON to the file, and return the command's status."""
    if text is not None:
        print(text)
    if path is not None:
        path.write_text(json_text + "\n")
    return 0
