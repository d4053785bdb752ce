"""`quire chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.base.errors import QuireError, RequestError
from quire.cli import lora_options, options

if TYPE_CHECKING:
    from quire.contracts.lora import LoRARequest
    from quire.contracts.sampling_params import SamplingParams
    from quire.engine.llm_engine import LLMEngine

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("chat", **options.PARSER, help="talk to a model", description=f"{__doc__} {_HELP}.")
    options.add_model_argument(parser)
    parser.add_argument("--system", help="system message")
    lora_options.add_lora(parser)
    options.add_sampling_options(parser, max_tokens=512)
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and answer until the input ends."""
    config = options.engine_config(args)
    lora = lora_options.lora_request(args)
    options.sampling_params(args, {})  # report a bad option before slow imports and loading the model
    from quire.engine.llm_engine import LLMEngine

    engine = LLMEngine(config)
    if lora is not None:
        engine.add_lora(lora)  # report a bad adapter before the first message
    if engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise RequestError(f"{config.model} has no chat template; use `quire generate`", "model")
    if sys.stdin.isatty():
        print(f"{_HELP}.", file=sys.stderr)
        _enable_line_editing()
    converse(engine, options.sampling_params(args, engine.report.generation_defaults), args.system, lora)
    engine.close()
    return 0


def converse(engine: LLMEngine, params: SamplingParams, system: str | None, lora: LoRARequest | None = None) -> None:
    """Read messages and print answers; a message that the engine refuses is taken back."""
    from quire.cli.stream import stream_to_terminal

    assert engine.tokenizer is not None
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    number = 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        number += 1
        try:
            prompt = {"prompt_token_ids": engine.tokenizer.encode_chat(messages)}
            streamed = stream_to_terminal(engine, f"chat-{number}", prompt, params, lora=lora)
            messages.append({"role": "assistant", "content": streamed.text})
            print(f"\n{streamed.describe_speed()}" if sys.stdin.isatty() else "")
            cut = streamed.describe_cut(params, engine.report.memory.max_model_len)
            if cut is not None:
                print(f"{cut} (/reset starts anew)", file=sys.stderr)
        except QuireError as error:
            messages.pop()
            print(f"error: {error} (/reset starts anew)", file=sys.stderr)
        except KeyboardInterrupt:
            messages.pop()
            print("\n[stopped]")


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it gives input() history and editing
    except ImportError:
        print("(no line editing: Python was built without readline)", file=sys.stderr)
