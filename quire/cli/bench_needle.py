"""`quire bench needle`: whether a model finds words in a long prompt, by KV format."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.cli import options
from quire.cli.figures import (
    add_against_compression_option,
    add_against_kv_option,
    add_output_option,
    check_output,
    read_text,
    report,
)


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `needle` to the kinds of `quire bench`."""
    parser = kinds.add_parser(
        "needle", **options.PARSER, help="needle in a haystack: whether a model finds words in a long prompt, by KV format"
    )
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text, of which the prompts are made")
    parser.add_argument("--lengths", nargs="+", type=int, default=(250, 500, 1000), help="tokens of a prompt")
    parser.add_argument(
        "--depths", nargs="+", type=float, default=(0.0, 0.25, 0.5, 0.75, 1.0), help="places of the needle, from 0 to 1"
    )
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts of each length and depth")
    add_against_kv_option(parser)
    add_against_compression_option(parser)
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = options.engine_config(args)
    check_output(args.output_json)
    text = read_text(args.text)
    from quire.bench.needle import NeedleGrid, measure_needles

    grid = NeedleGrid(tuple(args.lengths), tuple(args.depths), args.num_prompts)
    record = measure_needles(config, text, args.text.name, grid, args.against_kv, args.progress, args.against_compression)
    return report(record.describe(), record.to_json(), args.output_json)
