"""Command line options that several commands share, and their conversion to the engine's configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.cli.engine_options import ENGINE_OPTIONS
from quire.contracts.config import EngineConfig
from quire.contracts.constraint import StructuredOutputsParams
from quire.contracts.kv_compression import KvCompression, as_kv_compression
from quire.contracts.sampling_params import SamplingParams


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, and keeps the lines of a text that has examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n  " not in text:
            return super()._fill_text(text, width, indent)
        return "\n".join(f"{indent}{line}" for line in text.splitlines())


PARSER: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter}
"""How every subcommand parses: whole option names, and defaults in the help."""

_ENGINE_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(EngineConfig)
    if field.name not in ("model", "skip_tokenizer_init")
}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add what every command has."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options, NAME: VALUE; the command line and the environment (QUIRE_SERVE_PORT for --port of serve) "
        "win over it",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what to report")


_OPTION_NAMES = {
    option.settings["dest"]: option.names[0]
    for option in ENGINE_OPTIONS
    if option.settings.get("help") is not argparse.SUPPRESS and "dest" in option.settings
}
"""Options of the engine whose name on the command line is another one than that of the field."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine; their names and defaults are those of EngineConfig."""
    group = parser.add_argument_group("engine")
    for option in ENGINE_OPTIONS:
        group.add_argument(*option.names, **option.settings)
    parser.set_defaults(**_ENGINE_DEFAULTS)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as an argument of its own, which may also be given as --model."""
    where = "folder, hub id, or a bundled model: demo, demo-draft, demo-moe"
    parser.add_argument("model", nargs="?", default="demo", help=where)
    parser.add_argument("--model", dest="model_option", metavar="MODEL", default=argparse.SUPPRESS, help="the same")


def engine_config(args: argparse.Namespace, *, takes_replicas: bool = False) -> EngineConfig:
    """Return the configuration that the options describe. Raises ConfigError, also for replicas if the command runs only one
    engine."""
    model = getattr(args, "model_option", args.model)
    if not takes_replicas and args.data_parallel_size != 1:
        raise ConfigError(
            f"--data-parallel-size is {args.data_parallel_size}, but this command runs one engine: replicas are for `quire "
            "serve`, `quire batch run` and LLM; measure them with `quire bench serve` against a server"
        )
    values = {name: getattr(args, name) for name in _ENGINE_DEFAULTS}
    values["enable_lora"] |= any(getattr(args, name, None) for name in ("lora", "lora_modules"))
    return EngineConfig(model=model, **values)


def engine_arguments(args: argparse.Namespace) -> list[str]:
    """Return the engine's options as command line arguments, without the model."""
    words: list[str] = []
    for name, default in _ENGINE_DEFAULTS.items():
        value, option = getattr(args, name), _OPTION_NAMES.get(name, "--" + name.replace("_", "-"))
        if value == default:
            continue
        if isinstance(value, tuple):
            words.append(f"{option}={','.join(map(str, value))}")  # a value may begin with "-"
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{option.removeprefix('--')}")
        else:
            words.append(f"{option}={value}")
    return words


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the sampling options for the terminal; missing ones take the checkpoint's defaults."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help="output tokens at most")
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument("--top-p", type=float, help="share of the probability to sample from")
    group.add_argument("--top-k", type=int, help="number of candidates; 0: all")
    group.add_argument("--min-p", type=float, help="least probability, as a share of the best")
    group.add_argument("--repetition-penalty", type=float, help="above 1: repeat less")
    group.add_argument("--stop", action="append", help="string that ends the output; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at end of sequence")
    group.add_argument(
        "--bad-words", action="append", metavar="TEXT", help="text that the output never contains; may be given several times"
    )
    add_compression_option(group)
    _add_constraint_options(parser)


def add_compression_option(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add --kv-compression."""
    group.add_argument(
        "--kv-compression",
        type=parse_compression,
        metavar="JSON",
        help="evict KV blocks, which changes the output, or leave keys unread: fields of KvCompression, such as "
        '{"method": "streaming", "budget_tokens": 1024}',
    )


def parse_compression(text: str) -> KvCompression:
    """Return a KvCompression from JSON."""
    try:
        return as_kv_compression(json.loads(text))
    except (ValueError, RequestError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_constraint_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured outputs", "format of the whole output; one of")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--json-schema", "--guided-json", dest="json_schema", metavar="JSON", help="valid under a JSON schema: JSON, or a file"
    )
    kinds.add_argument("--json-object", action="store_true", help="any JSON object")
    kinds.add_argument("--regex", "--guided-regex", dest="regex", help="matches a regular expression")
    kinds.add_argument(
        "--choice",
        "--guided-choice",
        dest="choice",
        action="append",
        metavar="TEXT",
        help="one of several texts; given once for each",
    )
    kinds.add_argument(
        "--grammar", "--guided-grammar", dest="grammar", help="matches a grammar, Lark's notation or GBNF: text, or a file"
    )


def sampling_params(args: argparse.Namespace, defaults: dict[str, float]) -> SamplingParams:
    """Return the checkpoint's defaults with the options over them. Raises RequestError."""
    given = {name: getattr(args, name) for name in _SAMPLING_FIELDS if getattr(args, name) is not None}
    fixed = {"max_tokens": args.max_tokens, "stop": args.stop, "ignore_eos": args.ignore_eos, "bad_words": args.bad_words}
    fixed["structured_outputs"] = _structured_outputs(args)
    fixed["kv_compression"] = args.kv_compression
    return SamplingParams(**{**defaults, **given, **fixed})  # type: ignore[arg-type]


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    if args.json_schema is not None:
        return StructuredOutputsParams(json=_read_schema(args.json_schema))
    if args.grammar is not None:
        return StructuredOutputsParams(grammar=_read_file_or_text(args.grammar))
    if args.json_object:
        return StructuredOutputsParams(json_object=True)
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    return None if args.choice is None else StructuredOutputsParams(choice=args.choice)


def _read_schema(value: str) -> str:
    text = _read_file_or_text(value)
    try:
        json.loads(text)
    except ValueError as error:
        kind = "the file is no JSON" if text is not value else "is neither JSON nor a file"
        raise ConfigError(f"--json-schema {value[:200]}: {kind}: {error}") from None
    return text


def _read_file_or_text(value: str) -> str:
    """Return the content of the file of that name, or the value itself if there is none."""
    try:
        return Path(value).expanduser().read_text(encoding="utf-8") if Path(value).expanduser().is_file() else value
    except UnicodeError as error:
        raise ConfigError(f"{value} cannot be read as UTF-8 text ({error}); give a text file") from error
    except (OSError, ValueError):
        return value  # too long for a name, or with a zero byte: text
