"""`quire cache`: look at the folder of a disk tier, check its pages, or empty it; engines may use it meanwhile."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sqlite3
import time
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli import options
from quire.contracts.memory import format_bytes
from quire.kv.tiers.disk_folder import FileStats, clear_folder, file_stats, is_in_use, verify_pages


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("cache", **options.PARSER, help="look after the folder of a disk tier", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stats = actions.add_parser("stats", **options.PARSER, help="show what is in it", description="Show what is in a folder.")
    stats.add_argument("--json", action="store_true", help="print JSON")
    clear = actions.add_parser(
        "clear",
        **options.PARSER,
        help="delete its pages",
        description="Delete the pages in a folder. Engines that use it go on, with an empty folder. The cache secret stays.",
    )
    verify = actions.add_parser(
        "verify",
        **options.PARSER,
        help="check every page",
        description="Read every page and compare its checksum. Damaged pages are removed; the exit status is then 1.",
    )
    verify.add_argument("--keep", action="store_true", help="do not remove damaged pages")
    for action, act in ((stats, _stats), (clear, _clear), (verify, _verify)):
        action.add_argument("dir", type=Path, metavar="DIR", help="the folder given as --kv-disk-dir")
        options.add_common_options(action)
        action.set_defaults(run=run, act=act)


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; 0, or 1 where verify has found damaged pages."""
    folder = args.dir.expanduser()
    try:
        return args.act(folder, args)
    except sqlite3.Error as error:
        raise ConfigError(f"the index in {folder} cannot be read: {error}; `quire cache clear {folder}` deletes it") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from None


def _stats(folder: Path, args: argparse.Namespace) -> int:
    files, is_used = file_stats(folder), is_in_use(folder)
    if args.json:
        print(json.dumps({"is_in_use": is_used, "files": [dataclasses.asdict(file) for file in files]}))
        return 0
    num_bytes = sum(file.num_bytes for file in files)
    users = "in use by an engine" if is_used else "not in use"
    print(f"{folder}: {sum(file.num_pages for file in files):,} pages, {format_bytes(num_bytes)} in slots, {users}")
    for file in files:
        print("\n".join(_file_lines(file)))
    return 0


def _file_lines(file: FileStats) -> list[str]:
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.used_s))
    lines = [f"\n{file.name}: {file.num_pages:,} pages, {format_bytes(file.num_bytes)}, last used {used}"]
    return lines + [f"    {name:<14} {value}" for name, value in file.fingerprint.items()]


def _clear(folder: Path, _args: argparse.Namespace) -> int:
    print(f"{folder}: {format_bytes(clear_folder(folder))} deleted")
    return 0


def _verify(folder: Path, args: argparse.Namespace) -> int:
    num_pages, num_damaged = verify_pages(folder, is_removed=not args.keep)
    fate = "kept" if args.keep else "removed"
    print(f"{folder}: {num_pages:,} pages, {num_damaged:,} damaged" + (f", which are {fate}" if num_damaged else ""))
    return 1 if num_damaged else 0
