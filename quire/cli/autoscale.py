"""`quire autoscale`: say how many replicas a cluster of quire servers should have, and flip and drain those behind a router."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.cli import options
from quire.cli.router import ADMIN_KEY_VARIABLE, BACKEND_KEY_VARIABLE

if TYPE_CHECKING:
    from quire.router.autoscale import Action, Limits, Objectives, Snapshot, State
    from quire.router.autoscale_router import RouterCluster
    from quire.router.autoscale_source import PrometheusSource


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "autoscale", **options.PARSER, help="say how many replicas a cluster should have", description=__doc__
    )
    group = parser.add_argument_group("where it looks: one of --prometheus and --router")
    group.add_argument("--prometheus", metavar="URL", help="server that scrapes the replicas")
    group.add_argument("--router", metavar="URL", help="a `quire router`, whose backends are asked for their metrics")
    group.add_argument("--admin-key", help=f"of the router's admin API; also {ADMIN_KEY_VARIABLE}")
    group.add_argument("--backend-key", help=f"for the metrics of its backends; also {BACKEND_KEY_VARIABLE}")
    group.add_argument("--interval", type=float, default=15.0, help="seconds between two looks")
    group.add_argument("--once", action="store_true", help="decide once, with no memory of earlier looks, and end")
    group = parser.add_argument_group("what it does: --dry-run, or --apply, --serve or both")
    group.add_argument("--dry-run", action="store_true", help="print the actions only")
    group.add_argument("--apply", action="store_true", help="flip and drain replicas through the router; needs --router")
    group.add_argument(
        "--serve",
        metavar="[HOST:]PORT",
        help="answer GET /replicas with the number of each role, for KEDA's metrics-api; --apply then only flips",
    )
    group = parser.add_argument_group("objectives: what one replica does")
    group.add_argument("--ttft", type=float, default=1.0, help="seconds to the first token")
    group.add_argument("--tpot", type=float, help="seconds per output token, of decode servers behind --router")
    group.add_argument("--prompt-tokens-per-s", type=float, default=10_000.0, help="that a replica computes within it")
    group.add_argument("--output-tokens-per-s", type=float, default=1_000.0, help="that a replica generates at its objective")
    group = parser.add_argument_group("limits")
    group.add_argument("--min-replicas", type=int, default=1, help="of each role")
    group.add_argument("--max-replicas", type=int, default=8, help="of each role")
    group.add_argument("--utilization", type=float, default=0.8, help="load of a replica above which one is added")
    group.add_argument("--up-delay", type=float, default=30.0, help="seconds after an action before a replica is added")
    group.add_argument("--down-delay", type=float, default=300.0, help="seconds for which a replica must be superfluous")
    group.add_argument("--action-timeout", type=float, default=600.0, help="seconds after which an action counts as failed")
    group.add_argument("--flip-delay", type=float, default=60.0, help="seconds between two flips")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line of JSON for each look."""
    from quire.router.autoscale import Objectives, State, decide
    from quire.router.autoscale_source import SourceError
    from quire.router.autoscale_targets import Targets, TargetServer

    _check(args)
    objectives = Objectives(args.ttft, args.prompt_tokens_per_s, args.output_tokens_per_s)
    limits = _limits(args)
    source, state, targets = _open(args, objectives), State(), Targets()
    server = None if args.serve is None else TargetServer(args.serve)
    try:
        while True:
            try:
                if args.once and args.router is not None:
                    source.read(time.monotonic())  # rates need two looks
                    time.sleep(args.interval)
                snapshot = source.read(time.monotonic())
            except SourceError as error:
                if args.once:
                    raise
                if server is not None:
                    server.show_error(str(error))
                print(json.dumps({"time": round(time.time(), 3), "error": str(error)}), flush=True)
            else:
                actions, state = decide(snapshot, objectives, limits, state)
                if not args.apply:
                    state = dataclasses.replace(state, flip=None)  # nobody changes the role
                targets.note(snapshot, state)
                if server is not None:
                    server.show(targets)
                line = _line(snapshot, actions, state)
                line["targets"] = dict(targets.by_role)
                if args.apply:
                    line["left"] = _apply(source, actions, only_flips=server is not None)
                print(json.dumps(line), flush=True)
            if args.once:
                return 0
            time.sleep(args.interval)
    finally:
        if server is not None:
            server.close()


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError where options do not go together."""
    if (args.prometheus is None) == (args.router is None):
        raise ConfigError("give one of --prometheus and --router")
    if args.dry_run == (args.apply or args.serve is not None):
        raise ConfigError("give --dry-run, or --apply (flip and drain replicas) or --serve (for KEDA) or both of these")
    if args.apply and args.router is None:
        raise ConfigError("--apply needs --router: replicas are flipped and drained by the router's admin API")
    if args.serve is not None and args.once:
        raise ConfigError("--serve goes on for ever, and --once does not: leave one of them out")
    if args.tpot is not None and not (args.router is not None and 0 < args.tpot < float("inf")):
        raise ConfigError(f"--tpot must be a positive number of seconds, and needs --router, got {args.tpot}")
    if not 0 < args.interval < float("inf"):
        raise ConfigError(f"--interval must be a positive number of seconds, got {args.interval}")


def _open(args: argparse.Namespace, objectives: Objectives) -> PrometheusSource | RouterCluster:
    from quire.router.autoscale_router import RouterCluster
    from quire.router.autoscale_source import PrometheusSource

    if args.prometheus is not None:
        return PrometheusSource(args.prometheus)
    admin_key = args.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)
    if not admin_key:
        raise ConfigError(f"--router needs the key of its admin API: give --admin-key, or set {ADMIN_KEY_VARIABLE}")
    backend_key = args.backend_key or os.environ.get(BACKEND_KEY_VARIABLE) or None
    return RouterCluster(args.router, admin_key, backend_key, ttft_s=objectives.ttft_s, tpot_s=args.tpot)


def _apply(cluster: PrometheusSource | RouterCluster, actions: tuple[Action, ...], *, only_flips: bool) -> list[str]:
    """Carry actions out; return what is left to do, and what failed: it counts as under way until --action-timeout."""
    from quire.router.autoscale import Flip
    from quire.router.autoscale_router import RouterCluster
    from quire.router.autoscale_source import SourceError

    left: list[str] = []
    for action in actions:
        if not isinstance(cluster, RouterCluster) or (only_flips and not isinstance(action, Flip)):
            continue
        try:
            left.append(cluster.carry_out(action))
        except SourceError as error:
            left.append(str(error))
    return [text for text in left if text]


def _limits(args: argparse.Namespace) -> Limits:
    from quire.router.autoscale import Limits

    return Limits(
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        utilization=args.utilization,
        up_delay_s=args.up_delay,
        down_delay_s=args.down_delay,
        action_timeout_s=args.action_timeout,
        flip_delay_s=args.flip_delay,
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
