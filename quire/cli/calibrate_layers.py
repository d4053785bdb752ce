"""`quire calibrate-layers`: find the layers that a model can skip while it drafts for itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.base.errors import ConfigError
from quire.cli import options
from quire.cli.figures import add_output_option, report
from quire.contracts.config import EngineConfig


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "calibrate-layers",
        **options.PARSER,
        help="find the layers that a model can skip while it drafts for itself",
        description=f"{__doc__} What it prints last goes to --speculative-config.",
    )
    parser.add_argument("model", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("text", type=Path, help="file of UTF-8 text of the kind that the model will write")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="as for serve")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of the text to use")
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate and print what was found."""
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1, got {args.max_tokens}")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{args.text} cannot be read as UTF-8 text ({error}); give a text file") from error
    config = EngineConfig(model=args.model, revision=args.revision, dtype=args.dtype)
    from quire.bench.layer_calibration import calibrate_layers

    found = calibrate_layers(config, text, args.max_tokens, args.progress)
    return report(found.describe(), found.to_json(), args.output_json)
