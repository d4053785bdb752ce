"""`quire explain`: what happened to a request of a running server, and where its time went."""

from __future__ import annotations

import argparse
import json
import os
import sys
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from quire.base.errors import ConfigError, RequestError, UnsupportedError
from quire.cli import options
from quire.cli.figures import check_output

if TYPE_CHECKING:
    from quire.serving.metrics.timeline_answers import KeptTimelines, Timeline, TimelineEntry

KEY_VARIABLE = "QUIRE_API_KEY"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_BAR_WIDTH = 30
_MAX_SHOWN_EVENTS = 60
_MAX_LISTED = 30
EXAMPLES = """examples:
  quire explain                                  the last requests
  quire explain req_1f0c2a                       one of them: the id of the answer, or its x-request-id header
  quire explain req_1f0c2a --chrome-trace a.json for https://ui.perfetto.dev
  quire explain --chrome-trace all.json          every kept request, and the engine's steps
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "explain", **options.PARSER, help="what happened to a request of a server", description=__doc__, epilog=EXAMPLES
    )
    parser.add_argument(
        "request_id", nargs="?", metavar="REQUEST_ID", help="id of the answer, or its x-request-id; without: list the requests"
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument(
        "--api-key", help=f"key of the server; also {KEY_VARIABLE}; a key sees its own requests, an admin's all"
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    parser.add_argument("--chrome-trace", type=Path, metavar="FILE", help="also write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for the server to answer")
    options.add_common_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server, and print what it says."""
    check_output(args.chrome_trace, "--chrome-trace")
    try:
        import msgspec

        from quire.serving.metrics.chrome_trace import chrome_trace
        from quire.serving.metrics.timeline_answers import KeptTimelines, RequestTimelines
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"this needs the package {error.name}, which is not installed: pip install 'quire[server]'"
        ) from None
    path = "/v1/requests/timelines" if args.request_id is None else f"/v1/requests/{quote(args.request_id, safe='')}/timeline"
    body = _ask(args.base_url, path, args.api_key or os.environ.get(KEY_VARIABLE), args.timeout)
    kind = KeptTimelines if args.request_id is None else RequestTimelines
    try:
        answer = msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise RequestError(f"{args.base_url}{path}: this is not an answer of quire: {error}", "base_url") from None
    if args.chrome_trace is not None:
        steps = answer.steps if isinstance(answer, KeptTimelines) else []
        args.chrome_trace.write_text(json.dumps(chrome_trace(answer.timelines, steps)) + "\n")
        print(f"{args.chrome_trace}: a trace for https://ui.perfetto.dev", file=sys.stderr)
    if args.json:
        print(json.dumps(json.loads(body), indent=2))
    elif isinstance(answer, KeptTimelines):
        print(describe_list(answer))
    else:
        print("\n\n".join(describe(timeline) for timeline in answer.timelines))
    return 0


def _ask(base_url: str, path: str, key: str | None, timeout_s: float) -> bytes:
    """Return the body of an answer. Raises ConfigError for a bad URL, RequestError with the server's message."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--base-url must be like http://127.0.0.1:8000, got {base_url!r}")
    url = base_url.rstrip("/").removesuffix("/v1") + path
    handlers = [ProxyHandler({})] if parts.hostname in _LOCAL else []
    request = Request(url, headers={} if key is None else {"authorization": f"Bearer {key}"})
    try:
        with build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return answer.read()
    except HTTPError as error:
        raise RequestError(_message_of(error), "request_id") from None
    except (URLError, OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise RequestError(f"{url}: no answer ({reason}); is the server running there?", "base_url") from None


def _message_of(error: HTTPError) -> str:
    """Return the message in the body of an error, or its status where it has none."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: status {error.code}, and no message of quire"


def describe(timeline: Timeline) -> str:
    """Return the text about one request."""
    names = [timeline.id, *(name for name in (timeline.http_request_id, timeline.client_request_id) if name is not None)]
    end = timeline.abort_reason or ", ".join(dict.fromkeys(timeline.finish_reasons))
    state = f"ended ({end})" if timeline.state == "ended" else timeline.state
    lines = [
        " = ".join(names),
        f"{timeline.route}, {state}: {timeline.prompt_tokens} prompt tokens ({timeline.cached_tokens} cached), "
        f"{timeline.output_tokens} output tokens",
        f"{_time(timeline.total_s)} in all, first token after {_time(timeline.time_to_first_token_s)}",
    ]
    if timeline.error is not None:
        lines.append(f"error: {timeline.error}")
    lines += ["", timeline.summary, "", *_phase_lines(timeline), "", *_event_lines(timeline.events)]
    if timeline.num_dropped_events:
        lines.append(f"{timeline.num_dropped_events} more events were not recorded")
    return "\n".join(lines)


def _phase_lines(timeline: Timeline) -> list[str]:
    from quire.serving.metrics.phases import LABELS

    names = {str(phase): label for phase, label in LABELS.items()}
    found: list[str] = []
    for phase in timeline.phases:
        bar = "#" * round(phase.share * _BAR_WIDTH)
        found.append(
            f"{phase.share:7.1%}  {_time(phase.seconds):>9}  {bar:<{_BAR_WIDTH}}  {names.get(phase.phase, phase.phase)}"
        )
    return found


def _event_lines(events: list[TimelineEntry]) -> list[str]:
    has_choices = any(entry.choice for entry in events)
    lines = [
        f"{entry.start_s * 1000:10.1f} ms  {f'[{entry.choice}] ' if has_choices else ''}{_event_text(entry)}"
        for entry in events
    ]
    if len(lines) <= _MAX_SHOWN_EVENTS:
        return lines
    half = _MAX_SHOWN_EVENTS // 2
    return [*lines[:half], f"{'':13}  ... {len(lines) - 2 * half} more: --json has all", *lines[-half:]]


def _event_text(entry: TimelineEntry) -> str:
    took = _time(entry.duration_s)
    if entry.kind == "admit":
        pages = [
            f"{count} KV pages from {tier}" for count, tier in ((entry.host_pages, "the host"), (entry.disk_pages, "disk"))
        ]
        loaded = ", ".join(text for text in pages if not text.startswith("0 "))
        cached = f", {entry.cached_tokens} tokens cached{f' ({loaded})' if loaded else ''}" if entry.cached_tokens else ""
        return f"admitted: {entry.tokens} tokens to compute{cached}"
    if entry.kind == "prefill":
        others = entry.step_tokens - entry.tokens
        more = f", with {others} tokens of other sequences" if others > 0 else ""
        which = f"step {entry.step}" if entry.steps == 1 else f"{entry.steps} steps from {entry.step}"
        return f"prefill: {entry.tokens} tokens in {took} ({which}{more})"
    if entry.kind == "decode":
        return _decode_text(entry)
    if entry.kind == "preempt":
        return f"preempted for {took}: {entry.reason}"
    if entry.kind == "finish":
        return f"finished: {entry.reason}, {entry.tokens} output tokens"
    waits = {
        "queue": "waited in the engine",
        "compile": "waited for the constraint to be compiled",
        "disk_read": "waited for the disk tier",
        "transfer": "waited for a prefill server",
    }
    if entry.kind in waits:
        return f"{waits[entry.kind]} for {took}"
    return entry.kind.replace("_", " ")


def _decode_text(entry: TimelineEntry) -> str:
    text = f"decode: {entry.tokens} tokens in {_time(entry.duration_s)}, {entry.steps} steps from {entry.step}"
    if entry.longest_step is not None:
        text += f", the longest {_time(entry.longest_step_s)} (step {entry.longest_step})"
    if entry.prefill_step_s:
        text += f", {_time(entry.prefill_step_s)} in steps with prompts of others"
    if entry.draft_tokens:
        text += f", {entry.accepted_tokens} of {entry.draft_tokens} draft tokens accepted"
    return text


def describe_list(answer: KeptTimelines) -> str:
    """Return a table of requests, the newest last."""
    head = f"{'request':<40} {'state':<8} {'prompt':>7} {'output':>7} {'first token':>12} {'total':>10}  most of it"
    rows = [
        f"{timeline.id:<40} {timeline.state:<8} {timeline.prompt_tokens:>7} {timeline.output_tokens:>7} "
        f"{_time(timeline.time_to_first_token_s):>12} {_time(timeline.total_s):>10}  {_longest_phase(timeline)}"
        for timeline in answer.timelines[-_MAX_LISTED:]
    ]
    num_hidden = len(answer.timelines) - len(rows)
    more = [f"{num_hidden} earlier ones: --json has all"] if num_hidden else []
    last = f"the last {answer.max_timelines} ended requests are kept, and {len(answer.timelines)} are known"
    return "\n".join([*([head] if rows else []), *more, *rows, last])


def _longest_phase(timeline: Timeline) -> str:
    longest = max(timeline.phases, key=lambda phase: phase.seconds, default=None)
    return "-" if longest is None else f"{longest.phase} {longest.share:.0%}"


def _time(seconds: float | None) -> str:
    from quire.serving.metrics.phases import format_s

    return "-" if seconds is None else format_s(seconds)
