"""`quire bench interference`: what a long prefill does to the time between tokens of running outputs."""

from __future__ import annotations

import argparse

from quire.cli import options
from quire.cli.figures import add_output_option, check_output, report


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `interference` to the kinds of `quire bench`."""
    parser = kinds.add_parser(
        "interference",
        **options.PARSER,
        help="time between tokens of running outputs while a long prompt is computed, in one engine and with a prefill engine",
    )
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--num-decodes", type=int, default=8, help="sequences that decode")
    parser.add_argument("--decode-tokens", type=int, default=32, help="tokens of their prompts")
    parser.add_argument("--prompt-tokens", type=int, default=900, help="tokens of the long prompt")
    parser.add_argument("--num-steps", type=int, default=20, help="steps that are measured before and after the long prompt")
    parser.add_argument("--num-rounds", type=int, default=4, help="long prompts, one after the other")
    parser.add_argument(
        "--chunks", nargs="*", type=int, default=(0, 128, 32), help="values of --long-prefill-token-threshold in one engine"
    )
    parser.add_argument(
        "--prefill-threads", type=int, help="threads of the prefill engine, of --num-threads; 0: none; half, if not given"
    )
    add_output_option(parser)
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where tokens differ."""
    from quire.bench.interference import InterferenceOptions, measure_interference

    check_output(args.output_json)
    config = options.engine_config(args)
    wanted = InterferenceOptions(
        num_decodes=args.num_decodes,
        decode_tokens=args.decode_tokens,
        prompt_tokens=args.prompt_tokens,
        num_steps=args.num_steps,
        num_rounds=args.num_rounds,
        chunks=tuple(args.chunks),
        prefill_threads=args.prefill_threads,
        seed=config.seed,
    )
    found = measure_interference(config, wanted)
    report(found.describe(), found.to_json(), args.output_json)
    return 0 if all(case.is_same for case in found.cases) else 1
