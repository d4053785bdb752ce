"""`quire pull`, `quire list` and `quire rm`: the models in the cache of the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
import time

from quire.base.errors import ConfigError
from quire.cli import options
from quire.contracts.memory import format_bytes

_PULL = (
    "Download a model from the Hugging Face hub, as the other commands do when they need it. An interrupted download goes "
    "on: files that are complete are not downloaded again."
)
_NAME = "hub id such as Qwen/Qwen3-0.6B"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the three subcommands."""
    pull = commands.add_parser("pull", **options.PARSER, help="download a model", description=_PULL)
    pull.add_argument("model", help=f"{_NAME}, or one with a file, owner/name:FILE.gguf")
    pull.add_argument("--revision", help="branch, tag or commit")
    pull.add_argument("--token", help="of the hub, for models that need one; else HF_TOKEN, or what `hf auth login` has stored")
    options.add_common_options(pull)
    pull.set_defaults(run=run_pull)
    listed = commands.add_parser(
        "list", **options.PARSER, help="list the models in the cache", description="List the models in the cache of the hub."
    )
    listed.add_argument("--json", action="store_true", help="a JSON list")
    options.add_common_options(listed)
    listed.set_defaults(run=run_list)
    remove = commands.add_parser(
        "rm", **options.PARSER, help="remove models from the cache", description="Remove models from the cache of the hub."
    )
    remove.add_argument("models", nargs="+", metavar="MODEL", help=_NAME)
    remove.add_argument("--revision", help="remove only this branch, tag or commit")
    options.add_common_options(remove)
    remove.set_defaults(run=run_remove)


def run_pull(args: argparse.Namespace) -> int:
    """Download, with the hub's progress bars on standard error, and print where the model is."""
    from quire.model.resolve import is_on_this_machine, resolve_model

    if is_on_this_machine(args.model):
        raise ConfigError(f"{args.model!r} is on this machine already; give a {_NAME} to download one")
    path = resolve_model(args.model, args.revision, args.token)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"{args.model}: {len(files)} {'file' if len(files) == 1 else 'files'}, {format_bytes(size)}, in {path}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Print a line for each model."""
    from quire.model.hub_cache import cached_models

    models = cached_models()
    if args.json:
        rows = [
            {
                "name": model.name,
                "num_bytes": model.num_bytes,
                "revisions": list(model.revisions),
                "last_used": int(model.last_used_s),
                "is_complete": model.is_complete,
            }
            for model in models
        ]
        print(json.dumps(rows, indent=2))
        return 0
    if not models:
        print("no models are in the cache; `quire pull MODEL` downloads one, and demo, demo-moe are bundled")
        return 0
    width = max(len("model"), *(len(model.name) for model in models))
    print(f"{'model':<{width}}  {'size':>10}  {'last used':<10}  revisions")
    for model in models:
        day = time.strftime("%Y-%m-%d", time.localtime(model.last_used_s))
        state = "" if model.is_complete else "  incomplete: `quire pull` goes on with it"
        print(f"{model.name:<{width}}  {format_bytes(model.num_bytes):>10}  {day:<10}  {', '.join(model.revisions)}{state}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """Remove the models in turn, and say what that frees."""
    from quire.model.hub_cache import remove_cached

    if args.revision is not None and len(args.models) > 1:
        raise ConfigError(f"--revision belongs to one model, got {len(args.models)}")
    for name in args.models:
        num_bytes = remove_cached(name, args.revision)
        what = name if args.revision is None else f"{name} at {args.revision}"
        print(f"removed {what}, {format_bytes(num_bytes)}")
    return 0
