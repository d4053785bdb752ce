"""`quire serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.environment import is_launched_group
from quire.base.errors import ConfigError, UnsupportedError
from quire.cli import fleet, lora_options, options

if TYPE_CHECKING:
    from quire.serving.config import ApiKey, ServerConfig

KEY_VARIABLE = "QUIRE_API_KEY"
EXAMPLES = """examples:
  quire serve                                       the bundled demo model at http://127.0.0.1:8000
  quire serve Qwen/Qwen3-0.6B --port 9000           a model of the Hugging Face hub
  quire serve ./model --host 0.0.0.0 --api-key KEY  for other machines, who need the key
  quire serve --config serve.yaml --port 9000       options from a file; the command line wins
  quire serve --config fleet.yaml                   several models, each loaded when it is needed: a file with models
  QUIRE_SERVE_PORT=9000 quire serve                 every option has such a variable
  quire serve ./model --uds /run/quire/http.sock    on a Unix socket
  quire serve ./model --ssl-keyfile key.pem --ssl-certfile cert.pem
  quire serve ./model --root-path /llm              after nginx, which has it at /llm
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve", **options.PARSER, help="serve the OpenAI API over HTTP", description=__doc__, epilog=EXAMPLES
    )
    options.add_model_argument(parser)
    _add_http_options(parser)
    _add_load_options(parser)
    _add_answer_options(parser)
    options.add_engine_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run, takes_fleet=True)


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("http")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; give a key unless it is local to this machine: without a key anyone can use the server",
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one, which is logged")
    group.add_argument("--uds", type=Path, metavar="PATH", help="Unix socket to listen on, instead of --host and --port")
    group.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="private key (PEM): serve HTTPS instead of HTTP")
    group.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate and its chain (PEM), for --ssl-keyfile")
    group.add_argument(
        "--root-path", default="", metavar="PREFIX", help="prefix of the paths at a proxy in front, such as /llm for nginx"
    )
    group.add_argument(
        "--api-key", action="append", default=None, help=f"key that clients must send; may be repeated; also {KEY_VARIABLE}"
    )
    group.add_argument("--api-key-file", type=Path, help="JSON list of keys with names and limits")
    group.add_argument(
        "--cache-secret-file",
        type=Path,
        help="secret that keeps the cached prompts of keys apart, made if absent; without: in --kv-disk-dir, or a "
        "new one at each start",
    )
    group.add_argument(
        "--served-model-name", nargs="+", default=(), help="names of the model for clients; *: any name is taken"
    )
    lora_options.add_lora_modules(group)
    group.add_argument("--allowed-origins", nargs="+", default=(), help="web origins that may call (CORS)")
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=("localhost", "127.0.0.1", "::1"),
        help="Host names answered while there is no key",
    )
    group.add_argument("--data-dir", type=_folder, help="where files, batches and responses are kept; without: in memory")
    group.add_argument("--page", action=argparse.BooleanOptionalAction, default=True, help="serve the web page at /")
    _add_limits(group)
    _add_watching_options(parser)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Add what bounds the bytes and the times of requests and of what is stored."""
    group.add_argument("--max-body-bytes", type=int, default=32 << 20, help="limit of a JSON body")
    group.add_argument(
        "--max-prompt-characters",
        type=int,
        help="limit of one prompt; default: 16 per token of the context, at least a million",
    )
    group.add_argument(
        "--max-held-body-bytes",
        type=int,
        default=512 << 20,
        help="limit of all bodies that arrive or are being answered; uploads count with the part in memory",
    )
    group.add_argument("--max-file-bytes", type=int, default=200 << 20, help="limit of an uploaded file")
    group.add_argument("--max-stored-batches", type=int, default=10_000, help="batches that a key may have within 30 days")
    group.add_argument("--max-stored-files", type=int, default=10_000, help="files that a key may store, including outputs")
    group.add_argument(
        "--max-stored-bytes",
        type=int,
        default=16 << 30,
        help="bytes of these files; also of stored responses, of which the oldest are removed beyond it",
    )
    group.add_argument("--head-timeout", type=float, default=10.0, help="seconds for the head of a request to arrive")
    group.add_argument("--body-timeout", type=float, default=30.0, help="seconds for its body to arrive, and one for each MiB")
    group.add_argument(
        "--slow-reader-bytes", type=int, default=256 << 10, help="unread bytes of a stream; beyond it the stream is aborted"
    )
    group.add_argument("--slow-reader-timeout", type=float, default=30.0, help="seconds that a stream may wait to be read")
    group.add_argument(
        "--keep-alive-comments", type=float, default=10.0, help="seconds of silence in a stream until a comment is sent"
    )


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty; leave it out to keep everything in memory")
    return Path(text)


def _add_watching_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watching")
    group.add_argument("--metrics", action=argparse.BooleanOptionalAction, default=True, help="serve /metrics")
    group.add_argument("--metric-labels", nargs="+", default=(), metavar="NAME=VALUE", help="labels of every metric")
    group.add_argument(
        "--kv-events-endpoint",
        metavar="ENDPOINT",
        help="ZeroMQ address for events of KV blocks, with their tokens, in vLLM's format: tcp://*:5557 binds, a host connects",
    )
    group.add_argument(
        "--kv-events-replay-endpoint", metavar="ENDPOINT", help="where missed events are asked for: tcp://*:5558"
    )
    group.add_argument(
        "--kv-events-encoding",
        choices=("array", "map"),
        default="array",
        help="of an event: an array, as in older versions of vLLM, or a map with its type, as in later ones and in SGLang",
    )
    group.add_argument(
        "--metrics-names",
        choices=("quire", "vllm", "both"),
        default="quire",
        help="prefix of the metrics; vllm: the names that endpoint pickers and dashboards for vLLM read",
    )
    group.add_argument(
        "--replica-id",
        default="",
        metavar="ID",
        help="4 to 8 characters of 0-9a-z, which ids of stored objects begin with: a router finds them by it after a restart",
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="of the log")
    group.add_argument(
        "--access-log", action=argparse.BooleanOptionalAction, default=True, help="log a line for each HTTP request"
    )
    group.add_argument("--otlp-endpoint", "--otlp-traces-endpoint", help="where OpenTelemetry traces go (OTLP over HTTP)")
    group.add_argument(
        "--max-timelines", type=int, default=256, help="ended requests that `quire explain` can explain; 0: none"
    )
    group.add_argument(
        "--goodput", nargs="+", default=(), metavar="KEY:MS", help="objectives, like ttft:500 tpot:50 e2el:10000"
    )


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--max-queued-requests", type=int, default=1024, help="requests waiting or running; over it 503")
    group.add_argument("--max-queued-tokens", type=int, default=2_000_000, help="prompt tokens waiting; over it 503")
    group.add_argument("--max-queue-wait", type=float, default=60.0, help="seconds of estimated wait; over it 503")
    group.add_argument("--request-timeout", type=float, default=600.0, help="seconds, for requests that do not set it")
    group.add_argument("--drain-grace", type=float, default=0.0, help="seconds to go on listening after SIGTERM")
    group.add_argument("--drain-timeout", type=float, default=25.0, help="seconds that running requests get after SIGTERM")
    group.add_argument("--watchdog-timeout", type=float, default=60.0, help="seconds without progress until a restart")
    group.add_argument("--start-timeout", type=float, default=900.0, help="seconds that the engine may take to load")
    group.add_argument("--max-restarts", type=int, default=5, help="of the engine in --restart-window, before giving up")
    group.add_argument("--restart-window", type=float, default=600.0, help="seconds in which restarts are counted")


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--tool-call-parser",
        default="auto",
        help="format of tool calls; auto: found in the chat template, else json; none: tools are refused",
    )
    group.add_argument("--reasoning-parser", default="auto", help="format of reasoning; auto: found in the chat template")
    group.add_argument("--max-n", type=int, default=16, help="choices a request may ask for")
    group.add_argument("--strict", action="store_true", help="refuse unknown fields in bodies")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; 0 after a graceful end."""
    if args.config is not None and fleet.is_fleet_file(args.config):
        return fleet.run(args)
    engine_config = options.engine_config(args, takes_replicas=True)
    config = server_config(args)
    if engine_config.parallel.world_size > 1 and engine_config.distributed_executor_backend is None and is_launched_group():
        from quire.engine.launched import exit_if_worker  # it loads torch

        exit_if_worker(engine_config, (args.host, args.port))
        # The launcher started the workers: it restarts all ranks, including this process.
        config = replace(config, max_restarts=0)
    try:
        from quire.serving.http.main import serve
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the server needs the package {error.name}, which is not installed: pip install 'quire[server]'"
        ) from None
    return serve(config, engine_config, args.log_level.upper())


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the server's configuration that the options describe. Raises ConfigError."""
    from quire.serving.config import ServerConfig

    return ServerConfig(
        host=args.host,
        port=args.port,
        uds=args.uds,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        root_path=args.root_path.rstrip("/"),
        access_log=args.access_log,
        api_keys=read_keys(args.api_key, args.api_key_file),
        served_model_names=tuple(args.served_model_name),
        lora_modules=lora_options.lora_modules(args),
        allowed_origins=tuple(args.allowed_origins),
        allowed_hosts=tuple(args.allowed_hosts),
        data_dir=args.data_dir,
        cache_secret_file=args.cache_secret_file,
        max_body_bytes=args.max_body_bytes,
        max_prompt_characters=args.max_prompt_characters,
        max_held_body_bytes=args.max_held_body_bytes,
        max_file_bytes=args.max_file_bytes,
        max_stored_files=args.max_stored_files,
        max_stored_bytes=args.max_stored_bytes,
        max_stored_batches=args.max_stored_batches,
        max_n=args.max_n,
        head_timeout_s=args.head_timeout,
        body_timeout_s=args.body_timeout,
        slow_reader_bytes=args.slow_reader_bytes,
        slow_reader_s=args.slow_reader_timeout,
        keep_alive_comment_s=args.keep_alive_comments,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        max_queue_wait_s=args.max_queue_wait,
        default_timeout_s=args.request_timeout,
        drain_grace_s=args.drain_grace,
        drain_timeout_s=args.drain_timeout,
        watchdog_timeout_s=args.watchdog_timeout,
        start_timeout_s=args.start_timeout,
        max_restarts=args.max_restarts,
        restart_window_s=args.restart_window,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        enable_page=args.page,
        enable_metrics=args.metrics,
        metric_labels=_read_labels(args.metric_labels),
        metrics_names=args.metrics_names,
        replica_id=args.replica_id,
        kv_events_endpoint=args.kv_events_endpoint,
        kv_events_replay_endpoint=args.kv_events_replay_endpoint,
        kv_events_encoding=args.kv_events_encoding,
        strict=args.strict,
        otlp_endpoint=args.otlp_endpoint,
        max_timelines=args.max_timelines,
        log_format=args.log_format,
        **_read_objectives(args.goodput),
    )


def _read_labels(pairs: tuple[str, ...] | list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or name in found:
            raise ConfigError(f"--metric-labels takes NAME=VALUE, each name once, got {pair!r}")
        found[name] = value
    return found


def _read_objectives(pairs: tuple[str, ...] | list[str]) -> dict[str, Any]:
    names = {"ttft": "slo_ttft_s", "tpot": "slo_tpot_s", "e2el": "slo_e2e_s"}
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            found[names[name]] = float(value) / 1000
        except (KeyError, ValueError):
            raise ConfigError(f"--goodput takes KEY:MILLISECONDS with the keys {', '.join(names)}, got {pair!r}") from None
    return found


def read_keys(given: list[str] | None, path: Path | None) -> tuple[ApiKey, ...]:
    """Return the keys of clients, of the options or else of the environment, and of a file. Raises ConfigError."""
    from quire.serving.auth import hash_key, read_key_file
    from quire.serving.config import ApiKey

    texts = given or []
    if not texts and os.environ.get(KEY_VARIABLE):
        texts = [os.environ[KEY_VARIABLE]]
    if any(not text.strip() for text in texts):
        raise ConfigError("--api-key: a key must not be empty")
    names = ["default"] if len(texts) == 1 else [f"key-{number}" for number in range(1, len(texts) + 1)]
    keys = [
        ApiKey(name, hash_key(text), is_admin=True, may_use_interactive=True) for name, text in zip(names, texts, strict=True)
    ]
    return (*keys, *(read_key_file(path) if path is not None else ()))
