"""`quire bench parallel`: how long ranks of one host wait for each other, and predicted step times of layouts of devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from quire.base.errors import ConfigError
from quire.cli import options
from quire.cli.figures import add_output_option, check_output, refuse_given, report
from quire.contracts.config import EngineConfig


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `parallel` to the kinds of `quire bench`."""
    parser = kinds.add_parser(
        "parallel", **options.PARSER, help="processes that share memory: barriers, sums in rank order, messages after idle time"
    )
    _add_measurement(parser)
    _add_simulation(parser)
    add_output_option(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4), help="processes of a group; a run for each number")
    parser.add_argument("--num-samples", type=int, default=5000, help="barriers and sums that are counted")
    parser.add_argument(
        "--idle",
        nargs="+",
        type=float,
        default=(0.001,),
        metavar="SECONDS",
        help="without a message before one that is measured",
    )
    parser.add_argument(
        "--idle-worker", type=float, default=5.0, metavar="SECONDS", help="how long a worker's idle cost is measured"
    )


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation", "steps from counted bytes, operations and collectives")
    group.add_argument("--simulate", metavar="DEVICExN", help="devices of the table of `quire plan`: H100x8")
    group.add_argument("--compare", action="store_true", help="measure one and two ranks of this machine next to predictions")
    group.add_argument("--model", default="demo-moe", help="folder, hub id, or a bundled model; only its configuration is read")
    group.add_argument(
        "--layout",
        action="append",
        metavar="tp4xdp2",
        help="tpN, epN (ranks with whole experts), homesN, dcpN, pcpN, ppN, dpN, or several; may be given several times. Usual "
        "ones, if not given",
    )
    group.add_argument("--batch-size", type=int, default=16, help="sequences that decode, on all devices together")
    group.add_argument("--context-len", type=int, default=1024, help="tokens of each sequence; not of --compare")
    group.add_argument(
        "--new-tokens", type=int, default=1, help="of them that a step computes: 1: it decodes; not of --compare"
    )
    group.add_argument("--imbalance", type=float, default=1.0, help="max/mean of the ranks' experts")
    group.add_argument("--hosts", type=int, default=1, help="hosts that the ranks of a layout are divided among")
    group.add_argument("--network-gb-per-s", type=float, default=50.0, help="between hosts, of each device; an assumption")
    group.add_argument("--expert-payload", default="auto", help="form of the rows that experts get: auto, model or fp8")
    group.add_argument(
        "--expert-stages", type=int, choices=(1, 2), default=2, help="1: a row goes to each rank; 2: once to a host"
    )
    group.add_argument(
        "--expert-halves", choices=("auto", "on", "off"), default="auto", help="exchange rows while experts compute others"
    )
    group.add_argument("--quantization", default="auto", help="of the weights: auto (the checkpoint's), int8, int4, fp8")
    group.add_argument(
        "--deterministic", action="store_true", help="results are gathered, not added: the collectives of deterministic"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, or simulate, and print."""
    from quire.bench.parallel import measure_parallel

    check_output(args.output_json)
    _check_given(args)
    if args.simulate is not None:
        return _simulate(args)
    if args.compare:
        return _compare(args)
    record = measure_parallel(args.ranks, args.num_samples, args.idle, args.idle_worker)
    return report(record.describe(), record.to_json(), args.output_json)


def _check_given(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that have no effect."""
    if args.simulate is not None and args.compare:
        raise ConfigError("--simulate and --compare: give one of them")
    if args.simulate is None:
        links = ("hosts", "network_gb_per_s", "expert_payload", "expert_stages", "expert_halves")
        of_simulate = ("context_len", "new_tokens", "imbalance", "deterministic", *links)
        refuse_given(args, _add_simulation, of_simulate, "needs --simulate DEVICExN")
    if args.simulate is None and not args.compare:
        refuse_given(args, _add_simulation, ("layout", "model", "batch_size", "quantization"), "needs --simulate or --compare")
    else:
        given = "--compare" if args.compare else "--simulate"
        names = ("ranks", "num_samples", "idle", "idle_worker")
        refuse_given(args, _add_measurement, names, f"must be left out with {given}")


def _simulate(args: argparse.Namespace) -> int:
    from quire.engine.inspect import inspect_model, weight_bytes_by_precision
    from quire.planner.expert_exchange import ExpertLinks
    from quire.planner.layout import Layout, parse_cluster, usual_layouts
    from quire.planner.model_shape import ModelShape
    from quire.planner.parallel_time import Load, ParallelSimulation, describe_times

    hardware, num_devices = parse_cluster(args.simulate)
    found = inspect_model(EngineConfig(model=args.model, device="cpu", num_kv_blocks=1, skip_tokenizer_init=True))
    is_gpu = hardware.kind == "gpu"
    shape = ModelShape.of(args.model, found, weight_bytes_by_precision(found, is_gpu), is_gpu=is_gpu)
    precision = shape.check_precision(args.quantization)
    layouts = usual_layouts(num_devices, bool(shape.experts))
    if args.layout is not None:
        layouts = [Layout.parse(text) for text in args.layout]
    for layout in layouts:
        if layout.num_devices > num_devices:
            raise ConfigError(f"layout {layout.name} has {layout.num_devices} devices, but --simulate has {num_devices}")
    is_cpu = hardware.kind == "cpu"
    halves = None if args.expert_halves == "auto" else args.expert_halves == "on"
    links = ExpertLinks(args.expert_payload, args.hosts, args.expert_stages == 2, halves, args.network_gb_per_s * 1e9)
    is_gathered, value_bytes = args.deterministic or is_cpu, 4 if is_cpu else 2
    simulation = ParallelSimulation(found.spec, shape, hardware, precision, shape.dtype, is_gathered, value_bytes, links=links)
    load = Load(args.batch_size, args.context_len, args.imbalance, args.new_tokens)
    if args.layout is None:
        layouts = [each for each in layouts if each.num_replicas <= load.num_sequences and each.num_tensor % args.hosts == 0]
    times = [simulation.step(layout, load) for layout in layouts]
    title = (
        f"SIMULATED: {args.model} ({precision}) on {num_devices} x {hardware.label}, {load.num_sequences} sequences of "
        f"{load.context_len} tokens"
    )
    return report(describe_times(times, title), json.dumps([asdict(time) for time in times], indent=1), args.output_json)


def _compare(args: argparse.Namespace) -> int:
    from quire.bench.parallel_compare import compare_here
    from quire.engine.inspect import inspect_model, weight_bytes_by_precision
    from quire.planner.layout import Layout
    from quire.planner.model_shape import ModelShape

    layouts = [Layout.parse(text) for text in args.layout or ("tp1", "tp2")]
    quantization = None if args.quantization == "auto" else args.quantization
    config = EngineConfig(
        model=args.model,
        device="cpu",
        num_kv_blocks=16 * args.batch_size,
        quantization=quantization,
        skip_tokenizer_init=True,
    )
    found = inspect_model(config)
    shape = ModelShape.of(args.model, found, weight_bytes_by_precision(found))
    record = compare_here(config, shape, shape.check_precision(args.quantization), args.batch_size, layouts)
    return report(record.describe(), record.to_json(), args.output_json)
