"""`quire bench serve`: the options of the load generator."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.cli import options
from quire.cli.figures import check_output
from quire.contracts.json_options import parse_object

_NOT_ONLY_OF_THE_ENGINE = ("tokenizer", "seed")
_OF_UTILIZATION = ("dtype", "quantization", "kv_cache_dtype")
_METRICS = ("ttft", "tpot", "itl", "e2el", "ttft_first_event", "ttft_visible", "tpot_events", "tpot_with_ttft", "e2el_body")
_QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the kinds of `quire bench`."""
    parser = kinds.add_parser("serve", **options.PARSER, help="load on a server of the OpenAI API: latencies and goodput")
    _add_target(parser)
    _add_dataset(parser)
    add_arrivals(parser)
    _add_report(parser)
    parser.add_argument("--in-process", action="store_true", help="through an engine of this process; --model is loaded")
    sweep = "a run for each value, concurrency:1,4,16 or rate:0.5,1,2; tokens/s per user against tokens/s"
    parser.add_argument("--sweep", metavar="KIND:VALUES", help=sweep)
    group = parser.add_argument_group("utilization: MBU and MFU, from the planner's counts of bytes and operations")
    group.add_argument("--hardware", help="what runs the server, a device of `quire plan`: published peaks, not measured")
    group.add_argument("--measured", type=Path, metavar="RECORD", help="a record of `quire bench steps`: measured peaks")
    group.add_argument("--num-devices", type=int, default=1, help="devices that share the model")
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run_serve)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", help="http://host:port, or https://host/path; instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="where the server listens")
    group.add_argument("--port", type=int, default=8000, help="where the server listens")
    group.add_argument("--backend", default="openai", choices=("openai", "openai-chat"), help="completions or chat")
    group.add_argument("--endpoint", help="path of the endpoint; /v1/completions or /v1/chat/completions, if not given")
    group.add_argument("--model", help="name of the model at the server; the first that it lists, if not given")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="may be given several times")
    group.add_argument("--extra-body", metavar="JSON", help="fields of every request's body, over the others")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--ignore-eos", action="store_true", help="request outputs of full length, if the server supports it")
    group.add_argument("--retry", type=int, default=0, help="attempts after status 429 or 503, each after Retry-After")
    group.add_argument("--request-timeout-sec", type=float, default=3600.0, help="of one attempt")
    group.add_argument("--ready-check-timeout-sec", type=float, default=30.0, help="how long to wait for the server")
    group.add_argument("--server-lag", action="store_true", help="also report how late the server's event loop was (quire's)")
    group.add_argument(
        "--beside", type=Path, metavar="JSON", help="record of the same run with --in-process: report what the server adds"
    )
    group.add_argument("--server-pid", type=int, action="append", default=[], help="also report this process's CPU time")


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", default="random", choices=("random", "trace", "custom"), help="their source")
    group.add_argument("--dataset-path", type=Path, help="trace (CSV or JSON lines), or JSON lines of prompts")
    group.add_argument("--num-prompts", type=int, help="requests; 1000 random ones or all of a file, if not given")
    group.add_argument("--max-trace-requests", type=int, help="requests of a trace at most")
    group.add_argument("--trace-duration", type=float, metavar="S", help="seconds of the trace's own time to take")
    group.add_argument("--random-input-len", "--input-len", type=int, default=1024, help="tokens of a prompt")
    group.add_argument("--random-output-len", "--output-len", type=int, default=128, help="tokens of an output")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, evenly")
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="tokens of a common prefix of all prompts, in addition to their own"
    )
    group.add_argument("--input-scale", type=float, default=1.0, help="multiply the lengths of prompts, and of equal blocks")
    group.add_argument("--output-scale", type=float, default=1.0, help="multiply the lengths of outputs")
    group.add_argument("--max-input-len", type=int, help="cut prompts to this many tokens")
    group.add_argument("--max-output-len", type=int, help="cut outputs to this many tokens")
    group.add_argument("--prompt-form", default="auto", choices=("auto", "ids", "text"), help="auto: ids but for chat")
    group.add_argument("--vocab-size", type=int, help="draw token ids below this; the tokenizer's, or 1000, if not given")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before the run that are not counted")


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    """Add when requests arrive, which `read_arrivals` reads."""
    group = parser.add_argument_group("arrivals")
    group.add_argument("--request-rate", type=float, default=math.inf, help="requests per second; inf: all at once")
    group.add_argument(
        "--max-concurrency", type=int, help="maximum number of concurrent requests; without a rate this is a closed loop"
    )
    processes = ("auto", "poisson", "fixed", "burst", "trace")
    group.add_argument("--arrival", default="auto", choices=processes, help="auto: a trace's own times, else poisson")
    group.add_argument("--burstiness", type=float, default=1.0, help="shape of gamma gaps: 1 is Poisson, less is burstier")
    group.add_argument("--burst-size", type=int, default=8, help="requests that come together, for --arrival burst")
    group.add_argument("--trace-speed", type=float, default=1.0, help="replay a trace this many times as fast")


def _add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits like ttft:200 tpot:50 e2el:5000")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="metrics of the table; the JSON has all")
    group.add_argument("--metric-percentiles", default="50,90,95,99", help="which percentiles")
    group.add_argument("--output-json", type=Path, help="write the figures to this file")
    group.add_argument("--save-result", action="store_true", help="write the figures to --result-dir")
    group.add_argument("--result-dir", type=Path, default=Path(), help="for --save-result")
    group.add_argument("--result-filename", help="for --save-result; made of model and time, if not given")
    group.add_argument("--save-detailed", action="store_true", help="with a row for every request in the JSON")
    group.add_argument("--html-report", type=Path, metavar="FILE", help="write a page with plots")
    group.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")


def run_serve(args: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; return 130 if the run was interrupted, 1 if no request succeeded."""
    from quire.bench.serving.html_report import render_html
    from quire.bench.serving.serve import run_serve as run

    wanted = _serve_options(args)
    if args.sweep is not None:
        return _run_sweep(args, wanted)
    for option, path in (("--output-json", args.output_json), ("--html-report", args.html_report)):
        check_output(path, option)
    if args.save_result:
        check_output(args.result_dir / "result.json", "--result-dir")
    report = run(wanted)
    print(report.describe())
    paths = [args.output_json] if args.output_json is not None else []
    if args.save_result:
        paths.append(args.result_dir / (args.result_filename or _file_name(report.setup.model)))
    for path in paths:
        path.write_text(report.to_json(args.save_detailed) + "\n", encoding="utf-8")
    if args.html_report is not None:
        args.html_report.write_text(render_html(report), encoding="utf-8")
    if report.result.is_interrupted:
        return 130
    return 0 if any(record.outcome == "ok" for record in report.result.records) else 1


def _run_sweep(args: argparse.Namespace, wanted: Any) -> int:
    """Measure the runs of --sweep, print a table, and write what was asked for."""
    from quire.bench.serving.html_report import render_sweep
    from quire.bench.serving.serve import run_serve as run
    from quire.bench.serving.sweep import Sweep, run_sweep

    sweep = Sweep.parse(args.sweep)
    for name in ("save_result", "save_detailed", "beside"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} must be left out with --sweep: it is for one run")
    if args.dataset_name == "custom":
        raise ConfigError("--dataset-name must be random or trace with --sweep, got 'custom': its prompts would be cached")
    sweep.check(wanted.arrivals)
    for option, path in (("--output-json", args.output_json), ("--html-report", args.html_report)):
        check_output(path, option)

    def run_one(arrivals: Any, number: int) -> Any:
        dataset = dataclasses.replace(wanted.dataset, seed=wanted.dataset.seed + number)
        return run(dataclasses.replace(wanted, arrivals=arrivals, dataset=dataset))

    result = run_sweep(sweep, wanted.arrivals, run_one)
    print(result.describe())
    if args.output_json is not None:
        args.output_json.write_text(result.to_json() + "\n", encoding="utf-8")
    if args.html_report is not None:
        args.html_report.write_text(render_sweep(result), encoding="utf-8")
    if result.is_interrupted:
        return 130
    return 0 if any(point.requests_per_minute > 0 for point in result.points()) else 1


def _serve_options(args: argparse.Namespace) -> Any:
    from quire.bench.serving.metrics import Goals
    from quire.bench.serving.serve import ServeOptions

    _refuse_idle_options(args)
    return ServeOptions(
        base_url=_base_url(args),
        endpoint=_endpoint(args.endpoint),
        backend=args.backend,
        model=args.model,
        tokenizer=args.tokenizer,
        headers={} if args.in_process else _headers(args.header),
        extra_body=_extra_body(args.extra_body),
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        prompt_form=args.prompt_form,
        vocab_size=args.vocab_size,
        num_retries=args.retry,
        timeout_s=args.request_timeout_sec,
        ready_timeout_s=args.ready_check_timeout_sec,
        num_warmups=args.num_warmups,
        server_pids=tuple(args.server_pid),
        server_lag=args.server_lag,
        beside=args.beside,
        dataset=_dataset(args),
        arrivals=read_arrivals(args),
        goals=Goals.parse(args.goodput),
        percentile_metrics=metric_names(args.percentile_metrics),
        percentiles=read_percentiles(args.metric_percentiles),
        has_progress=args.progress,
        engine=_engine(args) if args.in_process else None,
        peaks=_peaks(args),
    )


def _peaks(args: argparse.Namespace) -> Any:
    """Return the peaks for MBU and MFU; None where neither --hardware nor --measured is given. Raises ConfigError."""
    from quire.bench.serving.utilization import Peaks
    from quire.cli import planning_options

    if args.num_devices < 1:
        raise ConfigError(f"--num-devices must be an integer >= 1, got {args.num_devices}")
    if args.hardware is None and args.measured is None:
        if args.num_devices != 1:
            raise ConfigError("--num-devices needs --hardware or --measured")
        return None
    if args.model is None:
        raise ConfigError("--hardware and --measured need --model: the checkpoint that the server runs, or its folder")
    kept_layers = None if args.measured is not None else args.kv_cache_dtype_skip_layers
    changes = {"memory_gb": None, "quantization": args.quantization or "auto", "kv_cache_dtype_skip_layers": kept_layers}
    planned = argparse.Namespace(**{**vars(args), **changes})
    hardware, record = planning_options.read_machine(planned)
    shape, precision, kv_format = planning_options.read_shape(planned, hardware, record)
    number = args.num_devices
    return Peaks(
        shape, precision, kv_format, hardware.bytes_per_s * number, hardware.flops_of(precision) * number, hardware.label
    )


def _dataset(args: argparse.Namespace) -> Any:
    from quire.bench.serving.workload import Dataset

    return Dataset(
        name=args.dataset_name,
        path=args.dataset_path,
        num_prompts=args.num_prompts if args.max_trace_requests is None else args.max_trace_requests,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        input_scale=args.input_scale,
        output_scale=args.output_scale,
        max_input_len=args.max_input_len,
        max_output_len=args.max_output_len,
        trace_duration_s=args.trace_duration,
        seed=args.seed,
    )


def _engine(args: argparse.Namespace) -> Any:
    if args.model is None:
        args.model = "demo"
    return options.engine_config(args)


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that would be ignored."""
    has_peaks = args.hardware is not None or args.measured is not None
    if not args.in_process:
        engine = argparse.ArgumentParser()
        options.add_engine_options(engine)
        for name, default in vars(engine.parse_args([])).items():
            is_used = name in _NOT_ONLY_OF_THE_ENGINE or (has_peaks and name in _OF_UTILIZATION)
            if not is_used and getattr(args, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')} is of the engine: it needs --in-process")
    if args.dataset_name != "trace":
        for name in ("max_trace_requests", "trace_duration"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --dataset-name trace")
    if args.max_trace_requests is not None and args.num_prompts is not None:
        raise ConfigError("--max-trace-requests and --num-prompts say the same: give one of them")
    if args.result_filename is not None and not args.save_result:
        raise ConfigError("--result-filename needs --save-result")
    if args.save_detailed and args.output_json is None and not args.save_result:
        raise ConfigError("--save-detailed needs --output-json or --save-result")


def _base_url(args: argparse.Namespace) -> str:
    if args.base_url is not None:
        return args.base_url
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"--port must be from 1 to 65535, got {args.port}")
    return f"http://[{args.host}]:{args.port}" if ":" in args.host else f"http://{args.host}:{args.port}"


def _endpoint(path: str | None) -> str | None:
    if path is not None and (not path.startswith("/") or not path.isascii() or any(byte <= " " for byte in path)):
        raise ConfigError(f"--endpoint must be a path like /v1/completions, got {path!r}")
    return path


def _headers(items: list[str]) -> dict[str, str]:
    headers = {}
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key.strip()}"
    for item in items:
        name, equals, value = item.partition("=")
        is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not equals or not is_name or not value.isprintable() or not value.isascii():
            raise ConfigError(f"--header must be NAME=VALUE in printable ASCII, got {item!r}")
        if name.lower() in ("host", "content-length", "content-type", "transfer-encoding", "connection"):
            raise ConfigError(f"--header {name} is the client's own: leave it out")
        headers = {other: text for other, text in headers.items() if other.lower() != name.lower()}
        headers[name] = value
    return headers


def _extra_body(text: str | None) -> dict[str, Any]:
    body = {} if text is None else parse_object("--extra-body", text, "fields of the requests' bodies")
    if "stream" in body:
        raise ConfigError("--extra-body must leave stream alone: only streams can be timed")
    return body


def read_arrivals(args: argparse.Namespace) -> Any:
    """Return the Arrivals of the options. Raises ConfigError."""
    from quire.bench.serving.arrivals import Arrivals

    return Arrivals(args.request_rate, args.arrival, args.burstiness, args.burst_size, args.max_concurrency, args.trace_speed)


def metric_names(text: str) -> tuple[str, ...]:
    """Return the metrics of --percentile-metrics. Raises ConfigError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    allowed = (*_METRICS, *_QUEUE_METRICS)
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        raise ConfigError(f"--percentile-metrics takes names of {', '.join(allowed)}, with commas between, got {text!r}")
    return names


def read_percentiles(text: str) -> tuple[float, ...]:
    """Return the percentiles of --metric-percentiles. Raises ConfigError."""
    try:
        found = tuple(float(item) for item in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= item <= 100 for item in found):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100, with commas between, got {text!r}")
    return found


def _file_name(model: str) -> str:
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in model)
    return f"serve-{safe}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
