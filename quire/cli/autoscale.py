"""`quire autoscale --dry-run`: print how many replicas a cluster of quire servers should have, from Prometheus."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.cli import options

if TYPE_CHECKING:
    from quire.router.autoscale import Action, Limits, Snapshot, State


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "autoscale", **options.PARSER, help="say how many replicas a cluster should have", description=__doc__
    )
    parser.add_argument("--prometheus", required=True, metavar="URL", help="server that scrapes the replicas")
    parser.add_argument("--dry-run", action="store_true", help="print the actions; required, as nothing carries them out yet")
    parser.add_argument("--once", action="store_true", help="decide once, with no memory of earlier looks, and end")
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between two looks")
    group = parser.add_argument_group("objectives: what one replica does")
    group.add_argument("--ttft", type=float, default=1.0, help="seconds to the first token")
    group.add_argument("--prompt-tokens-per-s", type=float, default=10_000.0, help="that a replica computes within it")
    group.add_argument("--output-tokens-per-s", type=float, default=1_000.0, help="that a replica generates at its objective")
    group = parser.add_argument_group("limits")
    group.add_argument("--min-replicas", type=int, default=1, help="of each role")
    group.add_argument("--max-replicas", type=int, default=8, help="of each role")
    group.add_argument("--utilization", type=float, default=0.8, help="load of a replica above which one is added")
    group.add_argument("--up-delay", type=float, default=30.0, help="seconds after an action before a replica is added")
    group.add_argument("--down-delay", type=float, default=300.0, help="seconds for which a replica must be superfluous")
    group.add_argument("--action-timeout", type=float, default=600.0, help="seconds after which an action counts as failed")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line of JSON for each look."""
    from quire.router.autoscale import Limits, Objectives, State, decide
    from quire.router.autoscale_source import PrometheusSource, SourceError

    if not args.dry_run:
        raise ConfigError("only --dry-run is supported: the actions are printed, and carried out by nobody")
    if not 0 < args.interval < float("inf"):
        raise ConfigError(f"--interval must be a positive number of seconds, got {args.interval}")
    objectives = Objectives(args.ttft, args.prompt_tokens_per_s, args.output_tokens_per_s)
    limits = _limits(args, Limits)
    source, state = PrometheusSource(args.prometheus), State()
    while True:
        try:
            snapshot = source.read(time.monotonic())
        except SourceError as error:
            if args.once:
                raise
            print(json.dumps({"time": round(time.time(), 3), "error": str(error)}), flush=True)
        else:
            actions, state = decide(snapshot, objectives, limits, state)
            print(json.dumps(_line(snapshot, actions, state)), flush=True)
        if args.once:
            return 0
        time.sleep(args.interval)


def _limits(args: argparse.Namespace, kind: type[Limits]) -> Limits:
    return kind(
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        utilization=args.utilization,
        up_delay_s=args.up_delay,
        down_delay_s=args.down_delay,
        action_timeout_s=args.action_timeout,
    )


def _line(snapshot: Snapshot, actions: tuple[Action, ...], state: State) -> dict[str, object]:
    states = [replica.state for replica in snapshot.replicas]
    return {
        "time": round(time.time(), 3),
        "replicas": {one: states.count(one) for one in sorted(set(states))},
        "demand": {role: dataclasses.asdict(demand) for role, demand in snapshot.demand.items()},
        "actions": [{"action": type(action).__name__.lower(), **dataclasses.asdict(action)} for action in actions],
        "under_way": [role for role, one in state.roles.items() if one.action is not None],
    }
