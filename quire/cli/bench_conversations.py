"""`quire bench conversations`: the options of the measurement of KV tiers."""

from __future__ import annotations

import argparse

from quire.cli import options
from quire.cli.figures import add_output_option, check_output, report


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `conversations` to the kinds of `quire bench`."""
    parser = kinds.add_parser(
        "conversations", **options.PARSER, help="time to the first token of later turns, with and without KV tiers"
    )
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--num-turns", type=int, default=8, help="turns of a conversation")
    parser.add_argument("--first-tokens", type=int, default=400, help="tokens of a conversation's first prompt")
    parser.add_argument("--turn-tokens", type=int, default=40, help="tokens of each later one")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--working-set", type=float, default=4.0, help="tokens of all conversations, as a multiple of the pool")
    parser.add_argument(
        "--restart",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the last turn after a restart, and after kill -9",
    )
    add_output_option(parser)
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where tokens differ."""
    from quire.bench.conversations import ConversationOptions, measure_conversations

    check_output(args.output_json)
    config = options.engine_config(args)
    wanted = ConversationOptions(
        num_turns=args.num_turns,
        first_tokens=args.first_tokens,
        turn_tokens=args.turn_tokens,
        output_tokens=args.output_tokens,
        working_set=args.working_set,
        is_restarted=args.restart,
        seed=config.seed,
    )
    found = measure_conversations(config, wanted)
    report(found.describe(), found.to_json(), args.output_json)
    return 0 if all(case.is_same for case in found.cases) else 1
