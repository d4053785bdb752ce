"""What `quire plan` and `quire simulate` have in common: the model, what runs it, and the lengths of a load."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError
from quire.cli import engine_options, options
from quire.contracts.config import EngineConfig
from quire.contracts.model_spec import DTYPE_BYTES

if TYPE_CHECKING:
    from quire.bench.serving.workload import Dataset
    from quire.planner.hardware import Hardware
    from quire.planner.memory import Limits
    from quire.planner.model_shape import ModelShape
    from quire.planner.record import StepsRecord


@dataclass(frozen=True, slots=True)
class Machine:
    """A model and what runs it. record: of measured steps, if they are given in place of a device of the table."""

    shape: ModelShape
    hardware: Hardware
    limits: Limits
    precision: str
    kv_format: str
    record: StepsRecord | None


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, and what runs it."""
    options.add_model_argument(parser)
    group = parser.add_argument_group("machine")
    devices = "h100, h200, b200, a100, l40s, l4, rtx4090, mi300x, xeon-8480, epyc-9654 or ryzen-7950x"
    group.add_argument("--hardware", help=f"a device of the table, whose figures are not measured: {devices}")
    group.add_argument("--measured", type=Path, metavar="RECORD", help="a record of `quire bench steps`, in place of the table")
    group.add_argument("--memory-gb", type=float, help="memory of a device in 1e9 bytes; the table's, if not given")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    group.add_argument("--dtype", default="auto", choices=dtypes, help="of weights and activations; auto: the checkpoint's")
    group.add_argument("--quantization", default="auto", help="of the weights: auto (the checkpoint's), int8, int4, fp8")
    group.add_argument("--kv-cache-dtype", default="auto", help="format of the KV cache: auto (the model's), int8, fp8, ...")
    group.add_argument(
        "--kv-cache-dtype-skip-layers",
        type=engine_options.integers,
        metavar="0,-1",
        help="layers whose KV cache is not quantised; negative numbers count from the end; on a CPU one rank",
    )
    group.add_argument("--max-num-seqs", type=int, help="sequences that run at the same time; 128, if not given")
    group.add_argument("--max-num-batched-tokens", type=int, help="tokens in one step; the engine's default, if not given")
    group.add_argument("--max-model-len", type=int, help="tokens of a sequence; what the model takes, if not given")
    group.add_argument("--block-size", type=int, help="tokens in a KV block; the engine's default, if not given")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of the memory that may be taken")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the requests: a trace, or synthetic lengths."""
    group = parser.add_argument_group("requests")
    group.add_argument("--trace", type=Path, help="trace (CSV or JSON lines), in the formats of `quire bench serve`")
    group.add_argument("--trace-duration", type=float, metavar="S", help="seconds of the trace's own time to take")
    group.add_argument("--num-prompts", type=int, help="requests; 1000 synthetic ones or all of a trace, if not given")
    group.add_argument("--input-len", type=int, help="tokens of a prompt; 1024, if not given and there is no trace")
    group.add_argument("--output-len", type=int, help="tokens of an output; 128, if not given and there is no trace")
    group.add_argument("--range-ratio", type=float, default=0.0, help="synthetic lengths vary by this share, evenly")
    group.add_argument(
        "--prefix-len", type=int, default=0, help="tokens that all synthetic prompts begin with, beside their own"
    )
    group.add_argument("--input-scale", type=float, default=1.0, help="multiply the lengths of prompts, and of equal blocks")
    group.add_argument("--output-scale", type=float, default=1.0, help="multiply the lengths of outputs")
    group.add_argument("--max-input-len", type=int, help="cut prompts to this many tokens")
    group.add_argument("--max-output-len", type=int, help="cut outputs to this many tokens")
    group.add_argument("--seed", type=int, default=0, help="same seed, same load")


def read_dataset(args: argparse.Namespace) -> Dataset:
    """Return the dataset of the options. Raises ConfigError."""
    from quire.bench.serving.workload import Dataset

    if args.trace is not None:
        for name in ("input_len", "output_len"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for synthetic requests: leave it out, --trace has lengths")
    elif args.trace_duration is not None:
        raise ConfigError(f"--trace-duration needs --trace, got {args.trace_duration} without one")
    for name in ("input_len", "output_len"):  # named here as they are given
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be an integer >= 1, got {value}")
    return Dataset(
        name="random" if args.trace is None else "trace",
        path=args.trace,
        num_prompts=args.num_prompts,
        input_len=1024 if args.input_len is None else args.input_len,
        output_len=128 if args.output_len is None else args.output_len,
        range_ratio=args.range_ratio,
        prefix_len=args.prefix_len,
        input_scale=args.input_scale,
        output_scale=args.output_scale,
        max_input_len=args.max_input_len,
        max_output_len=args.max_output_len,
        trace_duration_s=args.trace_duration,
        seed=args.seed,
    )


def read_machine(args: argparse.Namespace) -> tuple[Hardware, StepsRecord | None]:
    """Return the hardware, and the measurement if one is given. Raises ConfigError unless exactly one of both is."""
    from quire.planner.hardware import HARDWARE, find_hardware, with_memory
    from quire.planner.record import StepsRecord

    if (args.hardware is None) == (args.measured is None):
        both = "neither" if args.hardware is None else "both"
        raise ConfigError(f"--hardware (one of {', '.join(HARDWARE)}) or --measured RECORD must be given, got {both}")
    if args.hardware is not None:
        return with_memory(find_hardware(args.hardware), args.memory_gb), None
    if args.kv_cache_dtype_skip_layers is not None:
        raise ConfigError("--kv-cache-dtype-skip-layers must be left out with --measured, whose record has the layers")
    record = StepsRecord.read(args.measured)
    for option, wanted, has in (
        ("--dtype", args.dtype, record.shape.dtype),
        ("--quantization", args.quantization, record.precision),
        ("--kv-cache-dtype", args.kv_cache_dtype, record.kv_format),
    ):
        if wanted not in ("auto", has):
            raise ConfigError(f"{option} must be auto or {has}, as --measured {args.measured} has it, got {wanted!r}")
    return with_memory(record.hardware, args.memory_gb), record


def read_shape(args: argparse.Namespace, hardware: Hardware, record: StepsRecord | None) -> tuple[ModelShape, str, str]:
    """Return the model's shape, and the formats of its weights and of its KV cache. Raises QuireError."""
    from quire.planner.memory import choose_kv_format

    model = getattr(args, "model_option", args.model)
    if record is not None:
        if record.shape.name != model:
            raise ConfigError(f"model must be {record.shape.name!r}, which --measured {args.measured} is of, got {model!r}")
        return record.shape, record.precision, record.kv_format
    from quire.engine.inspect import inspect_model, skipped_layers, weight_bytes_by_precision
    from quire.planner.model_shape import ModelShape

    report = inspect_model(EngineConfig(model=model, dtype=args.dtype, device="cpu", num_kv_blocks=1, skip_tokenizer_init=True))
    is_gpu, kept_layers = hardware.kind == "gpu", args.kv_cache_dtype_skip_layers
    if kept_layers is not None and args.kv_cache_dtype == "auto":
        raise ConfigError("--kv-cache-dtype-skip-layers needs a quantised --kv-cache-dtype, got 'auto': leave it out")
    kept = skipped_layers(kept_layers or (), report.spec)
    weight_bytes = weight_bytes_by_precision(report, is_gpu)
    copy_bytes = 0 if is_gpu else max(0, report.memory.weight_bytes - report.num_parameters * DTYPE_BYTES[report.spec.dtype])
    shape = ModelShape.of(model, report, weight_bytes, copy_bytes, kept, is_gpu)
    kv_format = choose_kv_format(shape, args.kv_cache_dtype, is_gpu, not is_gpu or hardware.has_float8)
    return shape, shape.check_precision(args.quantization), kv_format


def read_limits(args: argparse.Namespace, hardware: Hardware, shape: ModelShape, record: StepsRecord | None) -> Limits:
    """Return the limits of an engine: those of the measurement, the options, or the defaults. Raises ConfigError."""
    from quire.planner.memory import Limits

    measured: dict[str, Any] = {} if record is None else record.scheduler

    def wanted(name: str) -> Any:
        value = getattr(args, name)
        return measured.get(name) if value is None else value

    return Limits.usual(
        hardware,
        shape,
        max_num_seqs=wanted("max_num_seqs"),
        max_num_batched_tokens=wanted("max_num_batched_tokens"),
        max_model_len=wanted("max_model_len"),
        block_size=wanted("block_size"),
        memory_share=args.gpu_memory_utilization,
    )
