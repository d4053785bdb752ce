"""`quire bench`: measure whole runs, servers, or single kernels."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.cli import (
    bench_conversations,
    bench_interference,
    bench_needle,
    bench_overhead,
    bench_parallel,
    bench_serve,
    bench_steps,
    lora_options,
    options,
)
from quire.cli.figures import (
    add_against_compression_option,
    add_against_kv_option,
    add_output_option,
    check_output,
    read_text,
    report,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and its kinds."""
    parser = commands.add_parser(
        "bench", help="measure throughput, latency, servers, perplexity or kernels", description=__doc__
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    throughput = kinds.add_parser("throughput", **options.PARSER, help="many requests at once: requests and tokens per second")
    _add_workload(throughput, input_len=256, output_len=64)
    throughput.add_argument("--num-prompts", type=int, default=32, help="requests")
    throughput.add_argument("--repeat", type=int, default=1, help="runs; the median and the extremes are reported")
    lora_options.add_lora_modules(throughput, "requests use them in turn, and runs without any are measured too")
    throughput.set_defaults(run=run_throughput)
    latency = kinds.add_parser(
        "latency", **options.PARSER, help="one batch, again and again: time to the first token and per token"
    )
    _add_workload(latency, input_len=32, output_len=128)
    latency.add_argument("--batch-size", type=int, default=8, help="requests of a run")
    latency.add_argument("--num-iters-warmup", type=int, default=2, help="warm-up runs, which are not counted")
    latency.add_argument("--num-iters", type=int, default=5, help="runs that are counted")
    latency.set_defaults(run=run_latency)
    bench_serve.add_parser(kinds)
    bench_conversations.add_parser(kinds)
    bench_interference.add_parser(kinds)
    bench_needle.add_parser(kinds)
    bench_overhead.add_parser(kinds)
    bench_parallel.add_parser(kinds)
    bench_steps.add_parser(kinds)
    perplexity = kinds.add_parser(
        "perplexity", **options.PARSER, help="how well a model predicts a text, in one or more precisions"
    )
    _add_perplexity(perplexity)
    perplexity.set_defaults(run=run_perplexity)
    speculate = kinds.add_parser(
        "speculate", **options.PARSER, help="drafts: acceptance, tokens per step and speed compared with plain decoding"
    )
    _add_speculate(speculate)
    speculate.set_defaults(run=run_speculate)
    constrained = kinds.add_parser(
        "constrained",
        **options.PARSER,
        help="outputs under a JSON schema: time per token and character compared with unconstrained decoding",
    )
    _add_constrained(constrained)
    constrained.set_defaults(run=run_constrained)
    schemas = kinds.add_parser(
        "schemas", **options.PARSER, help="a sample of JSON schemas: how many are accepted, compile times, outputs that end"
    )
    _add_schemas(schemas)
    schemas.set_defaults(run=run_schemas)
    kernels = kinds.add_parser("kernels", **options.PARSER, help="single native kernels compared with the machine's peaks")
    _add_kernels(kernels)
    kernels.set_defaults(run=run_kernels)


def _add_workload(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument(
        "--random-input-len", "--input-len", type=int, default=input_len, dest="input_len", help="tokens of a prompt"
    )
    parser.add_argument(
        "--random-output-len", "--output-len", type=int, default=output_len, dest="output_len", help="tokens of an output"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="always to full length")
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text that the model has not been trained on")
    parser.add_argument("--max-tokens", type=int, help="tokens of the text to use; all, if not given")
    parser.add_argument("--context", type=int, help="tokens of a window; 512, or what the model takes, if not given")
    parser.add_argument("--stride", type=int, help="tokens between starts of windows; the context, if not given")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="PRECISION",
        help="also measure none, int8, int4, expert_capacity_factor=1.25 (or another lossy option of experts), or another "
        "model with this tokenizer; may be given several times",
    )
    add_against_kv_option(parser)
    add_against_compression_option(parser)
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)


def _add_speculate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text, whose passages are the prompts")
    parser.add_argument(
        "--task",
        choices=("continue", "quote", "copy", "edit"),
        default="continue",
        help="go on with a passage; or quote it, copy words in an order without sense, or repeat it with some words edited",
    )
    parser.add_argument("--words", type=int, default=64, help="words of a passage")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=['{"method": "ngram"}', '{"method": "suffix"}'],
        metavar="JSON",
        help="speculative_config of each, or replay:P, drafts of which a share P is right",
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="drafts of replay:P")
    parser.add_argument(
        "--force-acceptance",
        type=float,
        metavar="P",
        help="replace what the methods draft, after they have drafted it, by tokens of which a share P is right",
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 4, 16), help="requests at once")
    parser.add_argument("--waves", type=int, default=4, help="requests per place in the batch, so that it is refilled")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an output")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--num-iters", type=int, default=15, help="pairs of runs, with drafts and without, that are counted")
    parser.add_argument(
        "--warm-up-len", type=int, default=1024, help="tokens of an output before, with drafts, in runs that are not"
    )
    parser.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="choose the fastest number of drafts; otherwise always the maximum",
    )
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)


def _add_constrained(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text, whose passages are the prompts")
    parser.add_argument("--words", type=int, default=64, help="words of a passage")
    parser.add_argument("--schema", type=Path, help="JSON schema of the outputs; an order in a shop, if not given")
    parser.add_argument(
        "--white-space", action=argparse.BooleanOptionalAction, default=True, help="allow white space, as JSON does"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 16), help="requests at once")
    parser.add_argument("--output-len", type=int, default=384, help="tokens of an output at most")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--num-iters", type=int, default=5, help="runs that are counted")
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)


def _add_schemas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="folder, hub id, or a bundled model: demo, demo-draft, demo-moe")
    parser.add_argument(
        "--schemas", type=Path, required=True, help="JSON lines, a schema each, or an object with one in `schema`"
    )
    parser.add_argument("--output-len", type=int, default=512, help="tokens of an output at most")
    parser.add_argument("--num-outputs", type=int, default=5, help="outputs of a schema; 0: only the tokenizer is loaded")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_engine_options(parser)
    options.add_common_options(parser)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="qwen3-0.6b", help="whose shapes: a folder, hub id or bundled model")
    parser.add_argument("--isa", help="instruction set, as QUIRE_CPU_ISA; the best one, if not given")
    parser.add_argument("--threads", type=int, help="threads to compute with")
    kinds = ("linear", "best", "experts", "pack", "quantize", "attention", "store", "norm", "turn", "sampler", "recurrence")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="kernels")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 4, 16, 64, 512), help="rows of a call, but of attention")
    parser.add_argument("--lengths", nargs="+", type=int, default=(128, 1024, 4096), help="tokens of a context or prompt")
    parser.add_argument("--seconds", type=float, default=0.3, help="per kernel and shape")
    parser.add_argument("--working-set-bytes", type=int, help="data to rotate over; four times the largest cache, if not given")
    add_output_option(parser)
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    options.add_common_options(parser)


def run_throughput(args: argparse.Namespace) -> int:
    """Measure and print throughput."""
    from quire.bench.workload import Workload

    config = options.engine_config(args)
    check_output(args.output_json)
    workload = Workload(args.num_prompts, args.input_len, args.output_len, args.seed, args.ignore_eos, args.temperature)
    from quire.bench.throughput import measure_throughput

    figures = measure_throughput(config, workload, args.progress, args.repeat, lora_options.lora_modules(args))
    return report(figures.describe(), figures.to_json(), args.output_json)


def run_latency(args: argparse.Namespace) -> int:
    """Measure and print latency."""
    from quire.bench.workload import Workload

    config = options.engine_config(args)
    check_output(args.output_json)
    workload = Workload(args.batch_size, args.input_len, args.output_len, args.seed, args.ignore_eos, args.temperature)
    from quire.bench.latency import measure_latency

    figures = measure_latency(config, workload, args.num_iters_warmup, args.num_iters, args.progress)
    return report(figures.describe(), figures.to_json(), args.output_json)


def run_perplexity(args: argparse.Namespace) -> int:
    """Measure and print perplexity."""
    config = options.engine_config(args)
    check_output(args.output_json)
    text = read_text(args.text)
    from quire.bench.perplexity import Windows, compare_perplexity

    windows = Windows(args.context, args.stride, args.max_tokens, tuple(args.against_compression))
    record = compare_perplexity(config, text, args.text.name, windows, args.against, args.progress, args.against_kv)
    return report(record.describe(), record.to_json(), args.output_json)


def run_speculate(args: argparse.Namespace) -> int:
    """Measure and print the speedup by drafts."""
    config = options.engine_config(args)
    check_output(args.output_json)
    text = read_text(args.text)
    from quire.bench.speculate import Line, Trial, measure_speculation, num_requests
    from quire.bench.speculate_tasks import TASKS, count_passages

    largest = num_requests(max(args.batch_sizes), args.waves)
    num_prompts = max(largest, min(largest * args.num_iters, count_passages(text, args.words)))
    trial = Trial(
        methods=tuple(args.methods),
        batch_sizes=tuple(args.batch_sizes),
        prompts=TASKS[args.task](text, num_prompts, args.words),
        output_len=args.output_len,
        temperature=args.temperature,
        num_tokens=args.num_speculative_tokens,
        num_rounds=args.num_iters,
        is_adaptive=args.adaptive,
        warm_up_len=args.warm_up_len,
        num_waves=args.waves,
        forced_share=args.force_acceptance,
        task=args.task,
    )
    print(Line.header(), flush=True)
    record = measure_speculation(config, trial, args.progress, lambda line: print(line.describe(), flush=True))
    return report(None, record.to_json(), args.output_json)


def run_constrained(args: argparse.Namespace) -> int:
    """Measure and print the cost of constraints, and the time that forced tokens save."""
    config = options.engine_config(args)
    check_output(args.output_json)
    text = read_text(args.text)
    schema = None if args.schema is None else _read_schema(args.schema)
    from quire.bench.constrained import SCHEMA, ConstrainedTrial, measure_constrained
    from quire.bench.speculate_tasks import continuing_prompts

    trial = ConstrainedTrial(
        schema=SCHEMA if schema is None else schema,
        batch_sizes=tuple(args.batch_sizes),
        prompts=continuing_prompts(text, max(args.batch_sizes), args.words),
        max_tokens=args.output_len,
        temperature=args.temperature,
        num_rounds=args.num_iters,
        is_compact=not args.white_space,
    )
    record = measure_constrained(config, trial, args.progress)
    return report(record.describe(), record.to_json(), args.output_json)


def run_schemas(args: argparse.Namespace) -> int:
    """Measure and print the results of a sample of schemas."""
    config = options.engine_config(args)
    check_output(args.output_json)
    if args.output_len < 1 or args.num_outputs < 0:
        raise ConfigError(f"--output-len must be at least 1, --num-outputs 0, got {args.output_len} and {args.num_outputs}")
    schemas = _read_schemas(args.schemas)
    from quire.bench.schemas import SchemaTrial, measure_schemas

    record = measure_schemas(config, SchemaTrial(schemas, args.output_len, args.num_outputs, args.temperature), args.progress)
    return report(record.describe(), record.to_json(), args.output_json)


def _read_schemas(path: Path) -> tuple[Any, ...]:
    lines = [line for line in read_text(path, "--schemas").splitlines() if line.strip()]
    try:
        found = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ConfigError(f"--schemas {path} is not JSON lines: {error}") from error
    if not found:
        raise ConfigError(f"--schemas {path} holds no schema")
    return tuple(one["schema"] if isinstance(one, dict) and "schema" in one else one for one in found)


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(read_text(path, "--schema"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{path} must hold a JSON schema, an object, got {type(schema).__name__}")
    return schema


def run_kernels(args: argparse.Namespace) -> int:
    """Measure and print single kernels."""
    check_output(args.output_json)
    from quire.bench.kernels import KernelOptions, measure_kernels

    wanted = KernelOptions(
        model=args.model,
        isa=args.isa,
        num_threads=args.threads,
        only=tuple(args.only),
        rows=tuple(args.rows),
        lengths=tuple(args.lengths),
        seconds=args.seconds,
        working_set_bytes=args.working_set_bytes,
    )
    record = measure_kernels(wanted, args.progress)
    return report(record.describe(), record.to_json(), args.output_json)
