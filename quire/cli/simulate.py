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
from quire.cli.figures import check_output, refuse_given
from quire.contracts.config import STAGING_BYTES

_MAX_SAVED_BYTES = 64 << 20
"""Of pages that one step saves, as in the engine."""


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
    _add_events(parser)
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


def _add_events(parser: argparse.ArgumentParser) -> None:
    """Add prefill and decode apart, KV tiers, failures and the autoscaler."""
    group = parser.add_argument_group("prefill and decode apart")
    group.add_argument("--prefill-replicas", type=int, default=0, help="replicas for prefill; --replicas then decode")
    group.add_argument(
        "--prefill-min-tokens", type=int, default=256, help="shorter prompts are computed where they are decoded"
    )
    group.add_argument("--link-gb-per-s", type=float, default=10.0, help="1e9 bytes per second of each prefill replica's link")
    group.add_argument("--link-latency-ms", type=float, default=0.0, help="of each hand-over")
    group = parser.add_argument_group("KV tiers of each replica")
    group.add_argument("--kv-host-gb", type=float, help="size of the host tier in 1e9 bytes; there is none, if not given")
    group.add_argument("--kv-host-gb-per-s", type=float, default=20.0, help="1e9 bytes per second between pool and host tier")
    group.add_argument("--kv-disk-gb", type=float, help="size of the disk tier in 1e9 bytes; there is none, if not given")
    group.add_argument("--kv-disk-gb-per-s", type=float, default=2.0, help="1e9 bytes per second of reads, and of writes")
    group.add_argument("--kv-disk-latency-ms", type=float, default=1.0, help="of each read for a request")
    group.add_argument(
        "--kv-save", default="reused", choices=("reused", "all", "write_through", "none"), help="which blocks the tiers save"
    )
    group = parser.add_argument_group("failures and scaling")
    group.add_argument(
        "--fail",
        nargs="+",
        default=[],
        metavar="REPLICA:AT_S[:RESTART_S]",
        help="a replica (from 0 on, prefill last) ends, and starts again after RESTART_S; its requests are retried",
    )
    group.add_argument("--autoscale", metavar="MIN:MAX", help="replicas of each role come and go, as `quire autoscale` decides")
    group.add_argument("--autoscale-interval", type=float, default=15.0, help="seconds between two decisions")
    group.add_argument("--replica-start", type=float, default=60.0, help="seconds until a replica that starts is ready")
    group.add_argument("--down-delay", type=float, default=300.0, help="seconds for which a replica must be superfluous")
    group.add_argument(
        "--prompt-tokens-per-s", type=float, help="that a replica computes within its objective; from step times, if not given"
    )
    group.add_argument(
        "--output-tokens-per-s", type=float, help="that a replica generates at its objective; from step times, if not given"
    )


def _check_events(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option without the one that it belongs to."""
    has_prefill, has_disk = args.prefill_replicas != 0, args.kv_disk_gb is not None
    has_tiers = has_prefill or has_disk or args.kv_host_gb is not None
    of_autoscale = ("autoscale_interval", "replica_start", "down_delay", "prompt_tokens_per_s", "output_tokens_per_s")
    for is_used, needed, names in (
        (has_prefill, "--prefill-replicas", ("prefill_min_tokens", "link_gb_per_s", "link_latency_ms")),
        (has_tiers, "--kv-host-gb, --kv-disk-gb or --prefill-replicas", ("kv_host_gb_per_s", "kv_save")),
        (has_disk, "--kv-disk-gb", ("kv_disk_gb_per_s", "kv_disk_latency_ms")),
        (args.autoscale is not None, "--autoscale", of_autoscale),
    ):
        if not is_used:
            refuse_given(args, _add_events, names, f"needs {needed}")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write what was asked for; 1 when no request succeeded."""
    from quire.simulate.run import simulate

    for option, path in (("--output-json", args.output_json), ("--html-report", args.html_report)):
        check_output(path, option)
    if args.save_detailed and args.output_json is None:
        raise ConfigError("--save-detailed needs --output-json")
    _check_events(args)
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
    from quire.bench.serving.utilization import Peaks
    from quire.planner.step_time import RooflineTime
    from quire.simulate.batching import Batching
    from quire.simulate.events import Failure
    from quire.simulate.run import SimulateOptions

    hardware, record = planning_options.read_machine(args)
    shape, precision, kv_format = planning_options.read_shape(args, hardware, record)
    limits = planning_options.read_limits(args, hardware, shape, record)
    num_devices = args.tensor_parallel_size
    _check_num_devices(num_devices, shape, record, hardware)
    page_bytes = shape.kv_bytes_per_token(kv_format) * limits.block_size
    tiers = _tiers(args, page_bytes)
    times = record.fit() if record is not None else RooflineTime(shape, hardware, precision, kv_format, num_devices)
    dataset = planning_options.read_dataset(args)
    machine = planning_options.Machine(shape, hardware, limits, precision, kv_format, record)
    has_prefixes = dataset.path is not None or dataset.prefix_len > 0 or tiers is not None
    scheduler = _scheduler_config(args, machine, tiers, has_prefixes)
    goals = Goals.parse(args.goodput)
    num_replicas = args.replicas + args.prefill_replicas
    return SimulateOptions(
        model=shape.name,
        machine=hardware.label if record is None else f"{hardware.label}, fit of {args.measured.name}",
        scheduler=scheduler,
        times=times,
        windows=shape.windows,
        num_replicas=args.replicas,
        routing=args.routing,
        batching=Batching(args.batching, args.batch_size, args.batch_delay_ms / 1000.0),
        dataset=dataset,
        arrivals=read_arrivals(args),
        goals=goals,
        percentile_metrics=metric_names(args.percentile_metrics),
        percentiles=read_percentiles(args.metric_percentiles),
        max_waiting=args.max_waiting,
        peaks=Peaks(
            shape,
            precision,
            kv_format,
            hardware.bytes_per_s * num_devices * num_replicas,
            hardware.flops_of(precision) * num_devices * num_replicas,
            hardware.label,
        ),
        hand_over=_hand_over(args, page_bytes),
        tiers=tiers,
        failures=tuple(Failure.parse(text) for text in args.fail),
        delivery=None if record is None else record.delivery,
        autoscale=_autoscale(args, scheduler, times, shape.windows, goals.limits_s),
    )


def _check_num_devices(num_devices: int, shape: Any, record: Any, hardware: Any) -> None:
    if num_devices < 1 or shape.num_kv_heads % num_devices:
        raise ConfigError(
            f"--tensor-parallel-size must divide the {shape.num_kv_heads} KV heads of {shape.name}, got {num_devices}"
        )
    if shape.has_kept_layers and num_devices > 1 and hardware.kind != "gpu":
        raise ConfigError(
            "--tensor-parallel-size must be 1 with --kv-cache-dtype-skip-layers, which ranks on CPUs do not support, got "
            f"{num_devices}"
        )
    if record is not None and num_devices > 1:
        raise ConfigError(
            f"--tensor-parallel-size must be 1 with --measured, whose steps are of one replica, got {num_devices}"
        )


def _scheduler_config(args: argparse.Namespace, machine: Any, tiers: Any, has_prefixes: bool) -> Any:
    """Return the scheduler's limits. Without prefixes to share, a prefix cache only costs time: it would find nothing."""
    from quire.contracts.scheduler_config import SchedulerConfig
    from quire.planner.memory import divide_memory, divide_pools

    limits, record = machine.limits, machine.record
    memory = divide_memory(
        machine.shape,
        machine.hardware,
        limits,
        machine.precision,
        machine.kv_format,
        args.tensor_parallel_size,
        tiers is not None,
    )
    num_blocks, window = memory.num_kv_blocks, memory.window
    if args.num_kv_blocks is not None:
        num_blocks, window = args.num_kv_blocks, None
        if memory.window is not None:
            num_blocks, window = divide_pools(machine.shape, limits, machine.kv_format, num_blocks, is_given=True)
    elif record is not None:
        config = record.scheduler_config(has_prefixes)
        if tiers is None:
            return config
        num_blocks = config.num_kv_blocks
    elif num_blocks < 1:
        raise ConfigError(
            f"{machine.shape.name} does not fit on {machine.hardware.name}: {memory.describe()}; give more devices or memory"
        )
    page_bytes = machine.shape.kv_bytes_per_token(machine.kv_format) * limits.block_size
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_kv_blocks=num_blocks,
        enable_prefix_caching=has_prefixes,
        num_host_pages=0 if tiers is None else tiers.num_host_pages,
        max_page_saves=max(1, int(_MAX_SAVED_BYTES // page_bytes)),
        kv_save=args.kv_save,
        window_tokens=None if window is None else window.num_tokens,
        num_window_blocks=0 if window is None else window.num_blocks,
    )


def _tiers(args: argparse.Namespace, page_bytes: float) -> Any:
    """Return the KV tiers; None: there are none. As in the engine, a disk tier and roles need a host tier to pass through."""
    from quire.simulate.tiers import TierOptions

    for option, size in (("--kv-host-gb", args.kv_host_gb), ("--kv-disk-gb", args.kv_disk_gb)):
        if size is not None and not 0 < size < float("inf"):
            raise ConfigError(f"{option} must be a number above 0, got {size:g}")
    if args.kv_host_gb is None and args.kv_disk_gb is None and args.prefill_replicas == 0:
        return None
    host_bytes = STAGING_BYTES if args.kv_host_gb is None else args.kv_host_gb * 1e9
    return TierOptions(
        page_bytes=page_bytes,
        num_host_pages=int(host_bytes // page_bytes),
        host_bytes_per_s=args.kv_host_gb_per_s * 1e9,
        num_disk_pages=0 if args.kv_disk_gb is None else int(args.kv_disk_gb * 1e9 // page_bytes),
        disk_bytes_per_s=args.kv_disk_gb_per_s * 1e9,
        disk_latency_s=args.kv_disk_latency_ms / 1000.0,
    )


def _hand_over(args: argparse.Namespace, page_bytes: float) -> Any:
    from quire.simulate.events import HandOverOptions

    if args.prefill_replicas == 0:
        return None
    return HandOverOptions(
        num_prefill=args.prefill_replicas,
        page_bytes=page_bytes,
        min_tokens=args.prefill_min_tokens,
        bytes_per_s=args.link_gb_per_s * 1e9,
        latency_s=args.link_latency_ms / 1000.0,
    )


def _autoscale(args: argparse.Namespace, scheduler: Any, times: Any, windows: Any, goals_s: dict[str, float]) -> Any:
    """Return the autoscaler, with what a replica does by its step times; None: there is none."""
    from quire.planner.step_time import StepWork
    from quire.router.autoscale import Limits, Objectives
    from quire.simulate.events import AutoscaleOptions

    if args.autoscale is None:
        return None
    least, most = AutoscaleOptions.parse_range(args.autoscale)
    prompts, outputs = args.prompt_tokens_per_s, args.output_tokens_per_s
    if prompts is None:
        chunk = min(scheduler.max_num_batched_tokens, scheduler.max_model_len)
        prompts = chunk / times.mean_s(StepWork.of_spans([(0, chunk)], windows, 1))
    if outputs is None:
        number, context = scheduler.max_num_seqs, max(1, scheduler.max_model_len // 4)
        fitting = max(1, scheduler.num_kv_blocks * scheduler.block_size // context)
        number = min(number, fitting)
        outputs = number / times.mean_s(StepWork.of_spans([(context, 1)] * number, windows, number))
    return AutoscaleOptions(
        objectives=Objectives(goals_s.get("ttft", 1.0), prompts, outputs),
        limits=Limits(min_replicas=least, max_replicas=most, down_delay_s=args.down_delay),
        interval_s=args.autoscale_interval,
        start_s=args.replica_start,
        tpot_s=goals_s.get("tpot"),
    )
