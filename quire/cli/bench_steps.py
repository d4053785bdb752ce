"""`quire bench steps`: the options of the benchmark of designed steps."""

from __future__ import annotations

import argparse
from dataclasses import replace

from quire.cli import options
from quire.cli.figures import add_output_option, check_output, report


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `steps` to the kinds of `quire bench`."""
    parser = kinds.add_parser("steps", **options.PARSER, help="times of single steps, for quire plan and quire simulate")
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure, about")
    parser.add_argument("--decode-steps", type=int, default=32, help="decode steps of each case")
    parser.add_argument(
        "--base-url", metavar="URL", help="a server with the model and nothing to do: also measure what it adds to the steps"
    )
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run_steps)


def run_steps(args: argparse.Namespace) -> int:
    """Measure steps, and print the fit."""
    config = options.engine_config(args)
    check_output(args.output_json)
    from quire.bench.steps import StepsTrial, measure_steps

    trial = StepsTrial(args.seconds, args.decode_steps, args.seed)
    if args.base_url is not None:
        from quire.bench.delivery import check_server

        check_server(args.base_url)  # before a minute is spent
    record = measure_steps(config, trial, args.progress)
    text = f"{len(record.steps)} steps\n{record.fit().describe()}"
    if args.base_url is not None:
        from quire.bench.delivery import measure_delivery

        record = replace(record, delivery=measure_delivery(args.base_url, record))
        text += f"\n{record.delivery.describe()}"  # pyright: ignore[reportOptionalMemberAccess]
    return report(text, record.to_json(), args.output_json)
