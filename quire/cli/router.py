"""`quire router`: one address in front of several OpenAI-compatible servers (quire, vLLM, SGLang)."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from quire.base.errors import UnsupportedError
from quire.cli import options

if TYPE_CHECKING:
    from quire.router.config import RouterConfig

ADMIN_KEY_VARIABLE = "QUIRE_ROUTER_ADMIN_KEY"
BACKEND_KEY_VARIABLE = "QUIRE_ROUTER_BACKEND_KEY"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("router", **options.PARSER, help="spread requests over several servers", description=__doc__)
    _add_http_options(parser)
    _add_routing_options(parser)
    _add_health_options(parser)
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def _add_http_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("http")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8080, help="port to listen on; 0: any free one, which is logged")
    group.add_argument("--backend", action="append", default=[], metavar="URL", help="a server; may be repeated")
    group.add_argument("--admin-key", help=f"key of the admin API, which is off without one; also {ADMIN_KEY_VARIABLE}")
    group.add_argument(
        "--backend-key",
        help=f"key for the router's own questions to backends; also {BACKEND_KEY_VARIABLE}; clients send their own",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        help="Host names that are answered, *: all; without: this machine's if --host is one of them, else all",
    )
    group.add_argument("--page", action=argparse.BooleanOptionalAction, default=True, help="serve the web page at /")
    group.add_argument("--max-body-bytes", type=int, default=32 << 20, help="limit of a JSON body")
    group.add_argument("--max-held-body-bytes", type=int, default=512 << 20, help="limit of all bodies that are held")
    group.add_argument("--drain-timeout", type=float, default=25.0, help="seconds that running requests get after SIGTERM")


def _add_routing_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument(
        "--policy",
        choices=("prefix", "round-robin", "least-loaded"),
        default="prefix",
        help="prefix: least predicted time to the first token, by cached prefixes and load",
    )
    group.add_argument(
        "--alias", action="append", default=[], metavar="NAME=MODEL", help="another name of a model; may be repeated"
    )
    group.add_argument(
        "--kv-events",
        action="append",
        default=[],
        metavar="BACKEND=ENDPOINT[,REPLAY]",
        help="where a backend publishes KV events: http://host:8000=tcp://host:5557,tcp://host:5558; may be repeated",
    )
    group.add_argument(
        "--kv-events-silence",
        type=float,
        default=10.0,
        help="seconds without events of a busy backend until a check",
    )
    group.add_argument("--tokenize-timeout", type=float, default=0.05, help="seconds for a backend to tokenise a prompt")
    group.add_argument("--prefix-chunk-bytes", type=int, default=256, help="of a prompt that an entry of the index stands for")
    group.add_argument("--max-prefix-chunks", type=int, default=1 << 16, help="entries of the index for each backend")
    group.add_argument("--max-retries", type=int, default=2, help="other backends for one request, before its first byte")
    group.add_argument("--max-resumes", type=int, default=3, help="how often other backends continue a broken stream")
    group.add_argument("--retry-ratio", type=float, default=0.2, help="retries for each request over time, at most")


def _add_health_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("health")
    group.add_argument("--health-interval", type=float, default=1.0, help="seconds between questions to a backend")
    group.add_argument("--health-timeout", type=float, default=5.0, help="seconds for an answer to one")
    group.add_argument("--max-health-failures", type=int, default=3, help="in a row until a backend is left out")
    group.add_argument("--connect-timeout", type=float, default=3.0, help="seconds for a connection to a backend")
    group.add_argument("--idle-timeout", type=float, default=600.0, help="seconds without a byte from a backend that answers")


def run(args: argparse.Namespace) -> int:
    """Route until a signal ends it; 0 after a graceful end."""
    try:
        from quire.router.main import route
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the router needs the package {error.name}, which is not installed: pip install 'quire[server]'"
        ) from None
    return route(router_config(args))


def router_config(args: argparse.Namespace) -> RouterConfig:
    """Return the configuration that the options describe. Raises ConfigError."""
    from quire.router.config import RouterConfig, parse_aliases, parse_backend, parse_kv_events

    return RouterConfig(
        host=args.host,
        port=args.port,
        backends=tuple(parse_backend(url) for url in args.backend),
        aliases=parse_aliases(args.alias),
        admin_key=args.admin_key or os.environ.get(ADMIN_KEY_VARIABLE) or None,
        backend_key=args.backend_key or os.environ.get(BACKEND_KEY_VARIABLE) or None,
        allowed_hosts=None if args.allowed_hosts is None else tuple(args.allowed_hosts),
        enable_page=args.page,
        policy=args.policy,
        kv_events=parse_kv_events(args.kv_events),
        kv_events_silence_s=args.kv_events_silence,
        tokenize_timeout_s=args.tokenize_timeout,
        prefix_chunk_bytes=args.prefix_chunk_bytes,
        max_prefix_chunks=args.max_prefix_chunks,
        max_body_bytes=args.max_body_bytes,
        max_held_body_bytes=args.max_held_body_bytes,
        health_interval_s=args.health_interval,
        health_timeout_s=args.health_timeout,
        max_health_failures=args.max_health_failures,
        connect_timeout_s=args.connect_timeout,
        idle_timeout_s=args.idle_timeout,
        max_retries=args.max_retries,
        max_resumes=args.max_resumes,
        retry_ratio=args.retry_ratio,
        drain_timeout_s=args.drain_timeout,
    )
