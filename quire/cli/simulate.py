"""`quire simulate`: how a load would be served, with the real scheduler on a virtual clock and a model of step times."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.cli import options, planning_options
from quire.cli.bench_serve import add_arrivals, metric_names, read_arrivals, read_percentiles
from quire.cli.figures import check_output


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "simulate",
        **options.PARSER,
        help="latencies and goodput of a load on hardware that is not at hand",
        description=__doc__,
    )
    planning_options.add_machine_options(parser)
    group = parser.add_argument_group("replicas")
    group.add_argument("--replicas", type=int, default=1, help="engines that divide the requests")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="devices of each replica")
    group.add_argument("--routing", default="least-loaded", help="round-robin, least-loaded or prefix (quire's own router)")
    group.add_argument("--num-kv-blocks", type=int, help="blocks of a replica's KV pool; what fits in the memory, if not given")
    group.add_argument("--max-waiting", type=int, help="requests that may wait at a replica; more are rejected with 503")
    group.add_argument("--batching", default="continuous", help="continuous (quire's), or for comparison dynamic or static")
    group.add_argument("--batch-size", type=int, default=8, help="of dynamic and static batching")
    group.add_argument("--batch-delay-ms", type=float, default=100.0, help="of dynamic batching: the wait for a full batch")
    planning_options.add_load_options(parser)
    add_arrivals(parser)
    parser.add_argument(
        "--sweep", metavar="KIND:VALUES", help="a simulation for each value, concurrency:1,4,16 or rate:0.5,1,2"
    )
    group = parser.add_argument_group("report")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits like ttft:200 tpot:50 e2el:5000")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="what the table shows; the JSON has all")
    group.add_argument("--metric-percentiles", default="50,90,95,99", help="which percentiles")
    group.add_argument("--output-json", type=Path, help="write the figures to this file")
    group.add_argument("--save-detailed", action="store_true", help="with a row for every request in the JSON")
    group.add_argument("--html-report", type=Path, metavar="FILE", help="write a page with plots")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write what was asked for; 1 when no request succeeded."""
    from quire.simulate.run import simulate

    for option, path in (("--output-json", args.output_json), ("--html-report", args.html_report)):
        check_output(path, option)
    if args.save_detailed and args.output_json is None:
        raise ConfigError("--save-detailed needs --output-json")
    wanted = _options(args)
    if args.sweep is not None:
        return _run_sweep(args, wanted)
    outcome = simulate(wanted)
    print(outcome.describe())
    if args.output_json is not None:
        figures = json.loads(outcome.report.to_json(args.save_detailed)) | {"simulation": outcome.extra()}
        args.output_json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.html_report is not None:
        from quire.bench.serving.html_report import render_html

        args.html_report.write_text(render_html(outcome.report), encoding="utf-8")
    return 0 if any(record.outcome == "ok" for record in outcome.report.result.records) else 1


def _run_sweep(args: argparse.Namespace, wanted: Any) -> int:
    """Simulate the runs of --sweep, print a table, and write what was asked for."""
    from quire.bench.serving.html_report import render_sweep
    from quire.bench.serving.sweep import Sweep, run_sweep
    from quire.simulate.run import simulate

    if args.save_detailed:
        raise ConfigError("--save-detailed must be left out with --sweep: it is for one run")

    def run_one(arrivals: Any, number: int) -> Any:
        return simulate(dataclasses.replace(wanted, arrivals=arrivals)).report

    result = run_sweep(Sweep.parse(args.sweep), wanted.arrivals, run_one)
    print(f"{result.describe()}\nSimulated, not measured: {wanted.machine}.")
    if args.output_json is not None:
        args.output_json.write_text(result.to_json() + "\n", encoding="utf-8")
    if args.html_report is not None:
        args.html_report.write_text(render_sweep(result), encoding="utf-8")
    return 0 if any(point.requests_per_minute > 0 for point in result.points()) else 1


def _options(args: argparse.Namespace) -> Any:
    from quire.bench.serving.metrics import Goals
    from quire.planner.memory import divide_memory
    from quire.planner.step_time import RooflineTime
    from quire.simulate.batching import Batching
    from quire.simulate.run import SimulateOptions

    hardware, record = planning_options.read_machine(args)
    shape, precision, kv_format = planning_options.read_shape(args, hardware, record)
    limits = planning_options.read_limits(args, hardware, shape, record)
    num_devices = args.tensor_parallel_size
    if num_devices < 1 or shape.num_kv_heads % num_devices:
        raise ConfigError(
            f"--tensor-parallel-size must divide the {shape.num_kv_heads} KV heads of {shape.name}, got {num_devices}"
        )
    if record is not None and num_devices > 1:
        raise ConfigError(
            f"--tensor-parallel-size must be 1 with --measured, whose steps are of one replica, got {num_devices}"
        )
    memory = divide_memory(shape, hardware, limits, precision, kv_format, num_devices)
    num_blocks = args.num_kv_blocks
    if num_blocks is None:
        num_blocks = memory.num_kv_blocks if record is None else record.scheduler["num_kv_blocks"]
        if num_blocks < 1:
            raise ConfigError(f"{shape.name} does not fit on {hardware.name}: {memory.describe()}; give more devices or memory")
    times = record.fit() if record is not None else RooflineTime(shape, hardware, precision, kv_format, num_devices)
    dataset = planning_options.read_dataset(args)
    return SimulateOptions(
        model=shape.name,
        machine=hardware.label if record is None else f"{hardware.label}, fit of {args.measured.name}",
        scheduler=_scheduler_config(limits, num_blocks, has_prefixes=dataset.path is not None or dataset.prefix_len > 0),
        times=times,
        windows=shape.windows,
        num_replicas=args.replicas,
        routing=args.routing,
        batching=Batching(args.batching, args.batch_size, args.batch_delay_ms / 1000.0),
        dataset=dataset,
        arrivals=read_arrivals(args),
        goals=Goals.parse(args.goodput),
        percentile_metrics=metric_names(args.percentile_metrics),
        percentiles=read_percentiles(args.metric_percentiles),
        max_waiting=args.max_waiting,
    )


def _scheduler_config(limits: Any, num_blocks: int, has_prefixes: bool) -> Any:
    """Return the scheduler's limits. Without prefixes to share, a prefix cache only costs time: it would find nothing."""
    from quire.contracts.config import SchedulerConfig

    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_kv_blocks=num_blocks,
        enable_prefix_caching=has_prefixes,
    )
