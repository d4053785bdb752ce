"""`quire experts`: write the file of --expert-placement, from the loads that --save-expert-load has counted."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.cli import engine_options, options
from quire.contracts.parallel import ParallelConfig

if TYPE_CHECKING:
    from quire.engine.experts import LayerBalance


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("experts", **options.PARSER, help="place the experts of a mixture model", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    place = actions.add_parser(
        "place",
        **options.PARSER,
        help="balance a load from nothing",
        description="Write a placement that balances a load. Copies are those of the busiest experts.",
    )
    place.add_argument("--tensor-parallel-size", "-tp", type=int, required=True, metavar="N", help="number of ranks")
    place.add_argument("--num-redundant-experts", type=int, default=0, metavar="N", help="copies of experts in each layer")
    improve = actions.add_parser(
        "improve",
        **options.PARSER,
        help="balance a load with few changes of a placement",
        description="Change a placement in few slots until it balances a load.",
    )
    improve.add_argument("--placement", required=True, metavar="FILE", help="the placement to improve")
    improve.add_argument("--limit", type=float, default=1.05, help="stop when the largest load is this much of the mean")
    improve.add_argument("--max-moves", type=int, default=20, help="slots of a layer that may change")
    for action, act in ((place, _place), (improve, _improve)):
        action.add_argument("--load", required=True, metavar="FILE", help="tokens of each expert: a file of --save-expert-load")
        action.add_argument(
            "--tensor-parallel-shares",
            type=engine_options.parse_shares,
            metavar="2,1",
            help="relative share of each rank; None: equal",
        )
        action.add_argument(
            "--hosts",
            type=int,
            default=1,
            metavar="N",
            help="that as many ranks each are on; keep pairs of experts on one host",
        )
        action.add_argument("--output", "-o", required=True, metavar="FILE", help="where the placement is written")
        options.add_common_options(action)
        action.set_defaults(run=run, act=act)


def run(args: argparse.Namespace) -> int:
    """Write the placement, and show the balance of each layer."""
    lines = args.act(args)
    print("layer  max/mean before   after  changed slots" + "  pairs on one host before   after" * (args.hosts > 1))
    for line in lines:
        pairs = "" if line.pairs_before is None else f"{line.pairs_before:>27.3f} {line.pairs_after:>7.3f}"
        print(f"{line.layer:>5} {line.before:>16.3f} {line.after:>7.3f} {line.num_moves:>6} of {line.num_slots}{pairs}")
    return 0


def _place(args: argparse.Namespace) -> list[LayerBalance]:
    from quire.engine.experts import place_experts

    if args.num_redundant_experts < 0:
        raise ConfigError(f"num_redundant_experts must be an integer >= 0, got {args.num_redundant_experts}")
    shares = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size, tensor_parallel_shares=args.tensor_parallel_shares
    ).shares
    return place_experts(args.load, args.num_redundant_experts, shares, args.output, args.hosts)


def _improve(args: argparse.Namespace) -> list[LayerBalance]:
    from quire.engine.experts import improve_experts

    if not args.limit >= 1:
        raise ConfigError(f"limit must be a number >= 1, got {args.limit}")
    if args.max_moves < 0:
        raise ConfigError(f"max_moves must be an integer >= 0, got {args.max_moves}")
    shares = args.tensor_parallel_shares
    if shares is not None:
        shares = ParallelConfig(tensor_parallel_size=len(shares), tensor_parallel_shares=shares).shares
    return improve_experts(args.load, args.placement, shares, args.limit, args.max_moves, args.output, args.hosts)
