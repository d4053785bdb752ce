"""Output of measured figures: to the terminal, and to a file if one is given. Refusals of options without effect."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli.options import parse_compression


def add_against_kv_option(parser: argparse.ArgumentParser) -> None:
    """Add --against-kv, the KV formats that a benchmark measures in addition to its own."""
    parser.add_argument(
        "--against-kv",
        action="append",
        default=[],
        metavar="FORMAT",
        help="also measure this --kv-cache-dtype: auto, int8, fp8, turboquant_4bit, k8v4; may be given several times",
    )


def add_against_compression_option(parser: argparse.ArgumentParser) -> None:
    """Add --against-compression, the KV compressions that a benchmark measures in addition."""
    parser.add_argument(
        "--against-compression",
        action="append",
        type=parse_compression,
        default=[],
        metavar="JSON",
        help='also measure this kv_compression, such as {"method": "snapkv", "budget_tokens": 256}; may be given several times',
    )


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


def read_text(path: Path, option: str = "--text") -> str:
    """Return the text of a file. Raises ConfigError that names the option."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read as UTF-8 text ({error}); give a text file") from error


def refuse_given(
    args: argparse.Namespace, add_options: Callable[[argparse.ArgumentParser], None], names: Iterable[str], why: str
) -> None:
    """Raise ConfigError for an option that has another value than its default.

    add_options  adds the options to a parser
    names        of those that have no effect here, as in args
    why          what follows the option in the message, such as "needs --autoscale"
    """
    parser = argparse.ArgumentParser()
    add_options(parser)
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(f"--{name.replace('_', '-')} {why}")
