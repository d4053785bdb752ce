"""The `quire` command: parse the arguments and hand over to a subcommand."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import quire
from quire.base.errors import QuireError
from quire.base.logging import setup_logging
from quire.base.suggestions import did_you_mean
from quire.base.threads import prefer_short_spins
from quire.cli import (
    autoscale,
    batch,
    bench,
    cache,
    calibrate_layers,
    calibrate_tree,
    chat,
    experts,
    explain,
    generate,
    hub,
    inspect,
    plan,
    quantize,
    router,
    serve,
    simulate,
    train_draft,
    tune,
)
from quire.cli.other_engines import explain_option
from quire.cli.settings import AppliedSettings, SettingsError, config_path_of, read_settings


class CommandParser(argparse.ArgumentParser):
    """Refuses what it does not know by its own name, not by that of the command above; its subcommands do so too."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the options are listed: all of them would hide it. Ends the program with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists the options\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Return what was parsed, with what the environment and --config set. Ends the program where something is left over."""
        words = list(sys.argv[1:] if args is None else args)
        namespace = argparse.Namespace() if namespace is None else namespace
        applied = None if self._has_commands() or {"-h", "--help"} & set(words) else self._settings(words)
        if applied is not None:
            applied.prepare(namespace)
        found, left = super().parse_known_args(words, namespace)
        if applied is not None:
            applied.finish(found)
        if left:
            known = list(self._option_string_actions)
            names = [one.split("=")[0] for one in left]
            hint = "".join(filter(None, (explain_option(name, known) for name in names)))
            close = [match for name in names for match in difflib.get_close_matches(name, known, 1)]
            self.error(f"unrecognized arguments: {' '.join(left)}{hint or did_you_mean(close)}")
        return found, left

    def _has_commands(self) -> bool:
        return any(isinstance(action, argparse._SubParsersAction) for action in self._actions)

    def _settings(self, words: list[str]) -> AppliedSettings:
        try:
            return AppliedSettings(self, read_settings(self, config_path_of(words)))
        except SettingsError as error:
            self.error(str(error))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        close = "".join(f"; did you mean {one}?" for one in difflib.get_close_matches(str(value), known, 1))
        what = "command" if isinstance(action, argparse._SubParsersAction) else "choice"
        raise argparse.ArgumentError(action, f"invalid {what}: {value!r} (choose from {', '.join(map(repr, known))}{close})")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = CommandParser(prog="quire", description="An LLM inference engine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        *(
            serve,
            router,
            autoscale,
            generate,
            chat,
            batch,
            hub,
            inspect,
            plan,
            simulate,
            quantize,
            calibrate_layers,
            calibrate_tree,
        ),
        *(train_draft, tune, experts, cache, explain, bench),
    ):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 after an error, 2 for bad usage, 130 when interrupted."""
    args = make_parser().parse_args(argv)
    setup_logging(args.log_level.upper())
    prefer_short_spins()
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open until the program ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end an answer
    try:
        return args.run(args)
    except QuireError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if args.debug:
            raise
        print()  # the shell's prompt goes on a line of its own
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`quire ... | head`); keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.debug:
            raise
        print(f"error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return 1
