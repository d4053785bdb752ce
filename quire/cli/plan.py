"""`quire plan`: which hardware a model needs for a load and its objectives, what that costs, and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.cli import options, planning_options
from quire.cli.figures import check_output


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "plan", **options.PARSER, help="users, batch, layout and cost of a model on given hardware", description=__doc__
    )
    planning_options.add_machine_options(parser)
    planning_options.add_load_options(parser)
    group = parser.add_argument_group("plan")
    group.add_argument("--num", type=int, default=1, help="devices that there are")
    group.add_argument("--rate", type=float, help="requests per second; those of the trace, if not given")
    group.add_argument("--slo", nargs="+", default=[], metavar="NAME:MS", help="objectives like ttft:500 tpot:50")
    group.add_argument("--price", type=float, help="of one device and hour, in any currency")
    group.add_argument("--prefix-hit-share", type=float, default=0.0, help="of prompt tokens, expected in the prefix cache")
    group.add_argument("--json", action="store_true", help="print the figures as JSON")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with a roofline chart")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 when no layout can be used."""
    from quire.planner.plan import make_plan
    from quire.planner.report import describe_plan

    check_output(args.html, "--html")
    plan = make_plan(_question(args))
    print(json.dumps(plan.to_dict(), indent=2) if args.json else describe_plan(plan))
    if args.html is not None:
        from quire.planner.html_report import render_plan

        args.html.write_text(render_plan(plan), encoding="utf-8")
    return 0 if plan.best is not None else 1


def _question(args: argparse.Namespace) -> Any:
    from quire.bench.serving.arrivals import Arrivals
    from quire.planner.capacity import Objectives
    from quire.planner.memory import Lengths
    from quire.planner.plan import Question
    from quire.simulate.workload import make_load

    hardware, record = planning_options.read_machine(args)
    objectives = Objectives.parse(args.slo)
    load = make_load(planning_options.read_dataset(args), Arrivals())
    shape, precision, kv_format = planning_options.read_shape(args, hardware, record)
    limits = planning_options.read_limits(args, hardware, shape, record)
    rate = args.rate
    if rate is None and args.trace is not None and load.requests[-1].due_s > 0:
        rate = len(load.requests) / load.requests[-1].due_s
    inputs = [one.num_input_tokens for one in load.requests]
    outputs = [one.num_output_tokens for one in load.requests]
    if min(inputs) < 1:
        raise ConfigError("the workload has a prompt without tokens")
    return Question(
        shape=shape,
        hardware=hardware,
        num_devices=args.num,
        lengths=Lengths.of(inputs, outputs, load.num_shared_tokens),
        limits=limits,
        precision=precision,
        kv_format=kv_format,
        objectives=objectives,
        rate=rate,
        price=args.price,
        hit_share=args.prefix_hit_share,
        measured=None if record is None else record.fit(),
    )
