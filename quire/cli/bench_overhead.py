"""`quire bench overhead`: the server compared with LLM.generate."""

from __future__ import annotations

import argparse
import socket
import sys

from quire.cli import options
from quire.cli.figures import add_output_option, check_output, report


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `overhead` to the kinds of `quire bench`."""
    parser = kinds.add_parser(
        "overhead", **options.PARSER, help="a server compared with LLM.generate: the same prompts through both, alternating"
    )
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests of a run, all at once")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an output")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--num-iters", type=int, default=5, help="rounds: a run through the server between two of LLM.generate")
    parser.add_argument(
        "--timelines", action="store_true", help="measure what recording the timelines of requests costs one engine instead"
    )
    add_output_option(parser)
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from quire.bench.overhead import measure_overhead, measure_timelines
    from quire.bench.workload import Workload

    check_output(args.output_json)
    config = options.engine_config(args)
    workload = Workload(args.num_prompts, args.input_len, args.output_len, config.seed, True, args.temperature)
    if args.timelines:
        record = measure_timelines(config, workload, args.num_iters)
        return report(record.describe(), record.to_json(), args.output_json)
    port = _free_port()
    words = ["serve", args.model, "--port", str(port), "--log-level", "warning", *options.engine_arguments(args)]
    record = measure_overhead(config, workload, [sys.executable, "-m", "quire", *words], port, args.num_iters)
    return report(record.describe(), record.to_json(), args.output_json)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
