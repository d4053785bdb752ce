"""Command line options that several commands share, and their conversion to the engine's configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError, RequestError
from quire.contracts.config import MODEL_IMPLS, EngineConfig
from quire.contracts.constraint import StructuredOutputsParams
from quire.contracts.kv_compression import KvCompression, as_kv_compression
from quire.contracts.parallel import EXECUTOR_BACKENDS, REPLICA_BACKENDS
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


class _OldSwitch(argparse.BooleanOptionalAction):
    """A switch under its old name: it is accepted for one release, with a warning."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """See argparse.Action."""
        prefix = "--no-" if option.startswith("--no-") else "--"
        new = prefix + self.dest.replace("_", "-")
        warnings.warn(
            f"{option} is deprecated, use {new}; the old name ends with the next release", FutureWarning, stacklevel=2
        )
        super().__call__(parser, namespace, values, option)


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


_OPTION_NAMES = {"prefill_urls": "prefill_url"}
"""Options of the engine whose name on the command line is another one."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine; their names and defaults are those of EngineConfig."""
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", help="folder or hub id of the tokenizer, when it is not with the model")
    group.add_argument(
        "--chat-template", metavar="FILE|NAME", help="Jinja file, or a name: of a template of the checkpoint's, or chatml"
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="auto: the checkpoint's")
    group.add_argument(
        "--model-impl",
        choices=MODEL_IMPLS,
        help="transformers: that library computes the model, slower, also types that quire has no implementation of",
    )
    quantizations = ("int8", "int4", "fp8")
    group.add_argument("--quantization", choices=quantizations, help="quantise the weights when they are loaded")
    group.add_argument(
        "--allow-missing-head", action="store_true", help="use the embedding where an untied checkpoint has no lm_head.weight"
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "int8", "fp8", "turboquant_4bit", "k8v4"),
        help="auto: the model's; int8, fp8: half; turboquant_4bit, k8v4: about a quarter, 2/5",
    )
    group.add_argument(
        "--kv-cache-dtype-skip-layers",
        type=integers,
        metavar="0,-1",
        help="layers whose KV cache is not quantised; negative numbers count from the end; on a CPU one rank",
    )
    group.add_argument("--max-model-len", type=int, help="tokens of a sequence, prompt and output together")
    group.add_argument("--max-num-seqs", type=int, help="sequences that run at the same time")
    group.add_argument("--max-num-batched-tokens", type=int, help="tokens computed in one step")
    group.add_argument("--block-size", type=int, help="tokens in a KV block; None: 16, on a GPU 64")
    group.add_argument("--num-kv-blocks", type=int, help="size of the KV pool in blocks")
    group.add_argument("--kv-cache-memory-bytes", type=int, help="size of the KV pool in bytes")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="reuse KV of equal prefixes")
    group.add_argument("--kv-host-bytes", type=int, help="size of the host tier: KV blocks that leave the pool are kept there")
    group.add_argument("--kv-disk-dir", metavar="DIR", help="folder of the disk tier of KV blocks; it outlives the server")
    group.add_argument("--kv-disk-bytes", type=int, help="the most that the folder of the disk tier may hold")
    group.add_argument("--kv-save", choices=("reused", "all", "write_through", "none"), help="which KV blocks the tiers keep")
    _add_role_options(group)
    group.add_argument("--long-prefill-token-threshold", type=int, help="prompt tokens of one sequence a step")
    group.add_argument("--scheduling-policy", choices=("fcfs", "priority"), help="order of requests")
    group.add_argument(
        "--complete-json-within-max-tokens",
        action=argparse.BooleanOptionalAction,
        help="complete JSON within max_tokens, if possible",
    )
    name = "complete_json_within_max_tokens"
    group.add_argument("--fit-structured-outputs", dest=name, action=_OldSwitch, help=argparse.SUPPRESS)
    group.add_argument("--max-logprobs", type=int, help="limit for requests; -1: none")
    group.add_argument("--seed", type=int, help="same seed, same output")
    group.add_argument("--device", help="auto (a GPU if there is one), cpu, cuda or cuda:N")
    group.add_argument("--gpu-memory-utilization", type=float, help="share of a GPU's memory that may be used")
    group.add_argument(
        "--cpu-offload-gb", type=float, help="GiB of weights in host memory, for models larger than the GPU; slower"
    )
    group.add_argument("--nvtx-ranges", action="store_true", help="mark each step on a GPU for profilers (Nsight Systems)")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs on a GPU: starts faster, decodes slower")
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the previous one runs; None: on a GPU and with pipeline stages, if possible",
    )
    backends = ("auto", "triton", "flashinfer", "flash_attn")
    group.add_argument(
        "--attention-backend", choices=backends, help="library for the attention of prompts on a GPU; auto: quire's kernels"
    )
    group.add_argument("--tile-table", metavar="FILE", help="tile sizes of the GPU kernels, a file of `quire tune`")
    group.add_argument(
        "--deterministic", action="store_true", help="batch-invariant: the same tokens in any batch; refused if not supported"
    )
    group.add_argument("--num-threads", type=int, help="threads to compute with; fewer on a machine that others use too")
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="N",
        help="processes that share the model, with the same tokens",
    )
    group.add_argument(
        "--tensor-parallel-shares",
        type=parse_shares,
        metavar="2,1",
        help="relative share of each of them; None: equal",
    )
    group.add_argument(
        "--enable-dp-attention",
        action="store_true",
        help="each of these processes has whole attention weights and attends to sequences of its own",
    )
    group.add_argument(
        "--dp-attention-size",
        type=int,
        metavar="N",
        help="with it: groups of these processes that do so, and divide the heads; None: one for each process",
    )
    group.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="each of these processes holds whole experts of a mixture model, instead of a part of every expert",
    )
    group.add_argument(
        "--expert-placement",
        metavar="linear|balanced|FILE",
        help="experts of each process: consecutive ones, those that balance --expert-load, or those of a file",
    )
    group.add_argument(
        "--expert-load", metavar="FILE", help="tokens of each expert, for balanced: a file of --save-expert-load"
    )
    group.add_argument(
        "--num-redundant-experts", type=int, metavar="N", help="copies of experts in other processes, in each layer"
    )
    group.add_argument("--save-expert-load", metavar="FILE", help="write the tokens of each expert there at the end")
    group.add_argument(
        "--enable-eplb", action="store_true", help="move experts between these processes by their load while the engine runs"
    )
    group.add_argument(
        "--eplb-config",
        metavar="JSON",
        help='when experts move: {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0, '
        '"log_balancedness": false}',
    )
    group.add_argument("--save-expert-placement", metavar="FILE", help="write the placement there after moves and at the end")
    group.add_argument(
        "--expert-capacity-factor",
        type=float,
        metavar="F",
        help="lossy: an expert takes at most F times the mean of a step, the rest goes to the next best; usual: 1.2 to 1.5",
    )
    group.add_argument(
        "--expert-bias-rate",
        type=float,
        metavar="R",
        help="lossy: choose busy experts less, by a bias that changes by R per step",
    )
    group.add_argument(
        "--expert-min-share", type=float, metavar="S", help="lossy: leave out experts below this share of a token's best one"
    )
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        metavar="N",
        help="replicas that divide the requests, each with the whole model: more of them at a time; serve and batch run",
    )
    group.add_argument(
        "--data-parallel-threads",
        type=_thread_counts,
        metavar="2,1",
        help="threads of each replica; None: --num-threads divided",
    )
    group.add_argument(
        "--data-parallel-backend",
        choices=REPLICA_BACKENDS,
        help="who starts the replicas of `quire serve`: mp: the server, on its host; ray: Ray, on any node of its cluster",
    )
    group.add_argument(
        "--host-memory-bytes", type=int, help="memory that all replicas together may plan with; None: the free memory"
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=int,
        metavar="N",
        help="processes that have a range of the layers each, with the same tokens",
    )
    group.add_argument(
        "--decode-context-parallel-size",
        "-dcp",
        type=int,
        metavar="N",
        help="share the KV cache of a sequence among N of the processes of -tp, of which it is a divisor; CPU",
    )
    group.add_argument(
        "--prefill-context-parallel-size",
        "-pcp",
        type=int,
        metavar="N",
        help="processes that have the whole model each and divide the tokens of a prompt, with the same tokens; CPU",
    )
    group.add_argument(
        "--pipeline-layers",
        type=integers,
        metavar="10,18",
        help="how many layers each of them has; None: so that all take about the same time",
    )
    group.add_argument("--enable-lora", action="store_true", help="take LoRA adapters (PEFT)")
    group.add_argument("--max-loras", type=int, help="LoRA adapters that are in memory at the same time")
    group.add_argument("--max-lora-rank", type=int, help="the largest rank of a LoRA adapter")
    group.add_argument("--enable-lora-experts", action="store_true", help="take memory for LoRA adapters of all experts")
    group.add_argument(
        "--distributed-executor-backend",
        choices=EXECUTOR_BACKENDS,
        help="who starts them; None: torchrun or a LeaderWorkerSet if one has, otherwise this process",
    )
    group.add_argument(
        "--distributed-timeout", dest="distributed_timeout_s", type=float, help="seconds after which a silent rank has failed"
    )
    group.add_argument(
        "--distributed-start-timeout",
        dest="distributed_start_timeout_s",
        type=float,
        help="seconds in which all ranks must have loaded",
    )
    group.add_argument(
        "--speculative-config",
        "--speculative",
        metavar="JSON",
        help='draft tokens ahead: {"method": "ngram", "num_speculative_tokens": 6}; methods: ngram, suffix, draft_model, '
        "eagle, eagle3, medusa, mtp, lookahead, self, or a list of several to be merged; demo-draft, demo-eagle3, demo-medusa "
        "and demo-mtp draft for the bundled demo model",
    )
    parser.set_defaults(**_ENGINE_DEFAULTS)


def _add_role_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--role", choices=("both", "prefill", "decode"), help="compute prompts and outputs, or one of them")
    group.add_argument(
        "--prefill-listen", metavar="ADDRESS", help="tcp://HOST:PORT or unix:PATH for decode engines while the role is prefill"
    )
    group.add_argument(
        "--prefill-url",
        dest="prefill_urls",
        type=_addresses,
        metavar="ADDRESS[,ADDRESS]",
        help="of --role decode: where prefill engines listen; without it a router tells them",
    )
    group.add_argument(
        "--prefill-min-tokens", type=int, help="of --role decode: prompts with fewer uncached tokens are computed here"
    )
    group.add_argument(
        "--transfer-secret-file", metavar="FILE", help="secret that prefill and decode engines share, made if absent"
    )
    group.add_argument(
        "--kv-transfer-backend",
        choices=("sockets", "nixl"),
        help="how pages travel between prefill and decode engines: shared memory or TCP, or NIXL (quire[nixl])",
    )


def _addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a list with commas."""
    return tuple(part.strip() for part in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Return the integers of a list with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between them, such as 10,18; got {text!r}") from None


def parse_shares(text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, such as 2,1, got {text!r}") from None


def _thread_counts(text: str) -> tuple[int, ...]:
    """Return the integers of a list with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between them, such as 2,1, got {text!r}") from None


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
        value, option = getattr(args, name), _OPTION_NAMES.get(name, name).replace("_", "-")
        if value == default:
            continue
        if isinstance(value, tuple):
            words += [f"--{option}", ",".join(map(str, value))]
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
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
        help="evict blocks of the KV cache, which changes the output: fields of KvCompression, such as "
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
