"""`quire quantize`: write a quantised copy of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli import options

if TYPE_CHECKING:
    from quire.model.quantized_writer import WrittenCheckpoint

_NUM_WORST = 5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "quantize",
        **options.PARSER,
        help="write a quantised copy of a checkpoint",
        description=f"{__doc__} The copy is a Hugging Face folder in compressed-tensors format (pack-quantized).",
    )
    parser.add_argument("model", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("out", type=Path, help="folder to write, new or empty")
    parser.add_argument("--to", choices=("int8", "int4"), required=True, help="bits of a weight")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=32, help="columns that share an int4 scale")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the copy and print what it is."""
    from quire.model.quantized_writer import write_quantized
    from quire.model.resolve import resolve_model

    source = resolve_model(args.model, args.revision)
    written = write_quantized(source, args.out.expanduser(), args.to, args.group_size, show_progress=args.progress)
    print("\n".join(describe(written)))
    return 0


def describe(written: WrittenCheckpoint) -> list[str]:
    """Return what was written as lines for people."""
    before, after = written.source_bytes, written.written_bytes
    worst = sorted(written.layers, key=lambda layer: layer.sqnr_db)[:_NUM_WORST]
    return [
        f"{written.folder}: {after / 1e6:,.1f} MB of tensors, {after / before:.0%} of {before / 1e6:,.1f} MB",
        f"{len(written.layers)} weights quantised to {written.bits_per_weight:.2f} bits each, scales included",
        "least signal to quantisation noise:",
        *(f"  {layer.sqnr_db:5.1f} dB at {layer.bits_per_weight:.2f} bits  {layer.module}" for layer in worst),
    ]
