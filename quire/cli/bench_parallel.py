"""`quire bench parallel`: how long ranks of one host wait for each other."""

from __future__ import annotations

import argparse

from quire.cli import options
from quire.cli.figures import add_output_option, check_output, report


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `parallel` to the kinds of `quire bench`."""
    parser = kinds.add_parser(
        "parallel", **options.PARSER, help="processes that share memory: barriers, sums in rank order, messages after idle time"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4), help="processes of a group; a run for each number")
    parser.add_argument("--num-samples", type=int, default=5000, help="barriers and sums that are counted")
    parser.add_argument(
        "--idle",
        nargs="+",
        type=float,
        default=(0.001,),
        metavar="SECONDS",
        help="without a message before one that is measured",
    )
    parser.add_argument(
        "--idle-worker", type=float, default=5.0, metavar="SECONDS", help="how long a worker's idle cost is measured"
    )
    add_output_option(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from quire.bench.parallel import measure_parallel

    check_output(args.output_json)
    record = measure_parallel(args.ranks, args.num_samples, args.idle, args.idle_worker)
    return report(record.describe(), record.to_json(), args.output_json)
