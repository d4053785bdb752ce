"""Command line options that name LoRA adapters."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.base.errors import ConfigError
from quire.contracts.lora import LoRARequest

_CHOSEN_BY_NAME = "requests choose one by its name as model"


def add_lora_modules(group: argparse._ActionsContainer, use: str = _CHOSEN_BY_NAME) -> None:
    """Add --lora-modules, of commands that serve several adapters. use: which requests use which, for the help."""
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=(),
        metavar="NAME=PATH",
        help=f"LoRA adapters (PEFT folders) to start with; {use}. Turns on --enable-lora",
    )


def lora_modules(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return (name, path) of NAME=PATH, or of vLLM's JSON objects with name and path. Raises ConfigError."""
    found: list[tuple[str, str]] = []
    known = {"name", "path", "base_model_name"}  # the last says nothing that is needed
    for item in args.lora_modules:
        name, separator, path = item.partition("=")
        if item.lstrip().startswith("{"):
            try:
                fields = json.loads(item)
            except ValueError as error:
                raise ConfigError(f"--lora-modules: {item[:100]!r} is no JSON ({error}); give NAME=PATH") from None
            name, path = fields.get("name"), fields.get("path")
            separator = isinstance(name, str) and isinstance(path, str) and fields.keys() <= known
        if not separator or not name or not path:
            raise ConfigError(f'--lora-modules takes NAME=PATH or {{"name": ..., "path": ...}}, got {item[:100]!r}')
        found.append((name, path))
    return tuple(found)


def add_lora(parser: argparse.ArgumentParser) -> None:
    """Add --lora, of commands that run one request at a time."""
    parser.add_argument("--lora", metavar="DIR", help="LoRA adapter (PEFT folder) to use. Turns on --enable-lora")


def lora_request(args: argparse.Namespace) -> LoRARequest | None:
    """Return the adapter of --lora, None if there is none. Raises RequestError."""
    return None if args.lora is None else LoRARequest(Path(args.lora).name or "adapter", 1, args.lora)
