"""`quire generate`: continue a prompt, streaming to the terminal."""

from __future__ import annotations

import argparse
import sys

from quire.base.errors import RequestError
from quire.cli import lora_options, options


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("generate", **options.PARSER, help="continue a prompt", description=__doc__)
    parser.add_argument("prompt", help="text to continue; - reads standard input")
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--echo", action=argparse.BooleanOptionalAction, default=True, help="print the prompt first")
    lora_options.add_lora(parser)
    options.add_sampling_options(parser, max_tokens=200)
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model, stream the continuation, and say on standard error how fast it was."""
    config = options.engine_config(args)
    lora = lora_options.lora_request(args)
    options.sampling_params(args, {})  # report a bad option before slow imports and loading the model
    prompt = _read_standard_input() if args.prompt == "-" else args.prompt
    from quire.cli.stream import stream_to_terminal
    from quire.engine.llm_engine import LLMEngine

    engine = LLMEngine(config)
    params = options.sampling_params(args, engine.report.generation_defaults)
    streamed = stream_to_terminal(engine, "generate", prompt, params, prompt if args.echo else "", lora)
    print()
    print(streamed.describe_speed(), file=sys.stderr)
    cut = streamed.describe_cut(params, engine.report.memory.max_model_len)
    if cut is not None:
        print(cut, file=sys.stderr)
    engine.close()
    return 0


def _read_standard_input() -> str:
    try:
        return sys.stdin.read().encode().decode()  # invalid UTF-8 was read as surrogates
    except UnicodeError:
        raise RequestError("standard input is not UTF-8 text", "prompt") from None
