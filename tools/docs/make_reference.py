"""Write docs/reference: the pages of commands, options, routes and metrics, from the code.

    python tools/docs/make_reference.py            # after an option, a route or a metric has changed

`tests/unit/test_docs.py` fails where a page is not what this writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from field_tables import field_meanings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
_NOTE = "<!-- Written by tools/docs/make_reference.py; do not edit. -->"
_ENGINE_GROUP = "engine"
_OWN_GROUPS = ("positional arguments", "options", "optional arguments")
_OPTION_HEADS = ("option", "default", "meaning")
_COMMON = ("--debug", "--log-level", "--config", "--help", "-h")


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(_cell(cell) for cell in row).replace("|  |", "| |") + " |" for row in rows]


def _code(value: object) -> str:
    return f"`{value}`"


def _page(title: str, text: str, *sections: list[str]) -> str:
    parts = [f"# {title}", _NOTE, text, *("\n".join(section) for section in sections)]
    return "\n\n".join(parts) + "\n"


def _default(action: argparse.Action) -> str:
    value = action.default
    if value is None or value is argparse.SUPPRESS or value == () or isinstance(action, argparse._StoreTrueAction):
        return ""
    return _code(" ".join(map(str, value)) if isinstance(value, tuple) else value)


def _option_name(action: argparse.Action) -> str:
    names = " ".join(_code(name) for name in action.option_strings)
    if not action.option_strings:
        return _code(action.metavar or action.dest)
    if action.choices is not None:
        return f"{names} {_code('|'.join(map(str, action.choices)))}"
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return names
    shown = action.metavar or action.dest.upper()
    if action.nargs is None and shown == action.option_strings[-1].removeprefix("--").upper().replace("-", "_"):
        return f"{names.removesuffix('`')}=`"
    return f"{names} {_code(shown if isinstance(shown, str) else ' '.join(shown))}"


def _is_shown(action: argparse.Action) -> bool:
    return (
        not isinstance(action, argparse._SubParsersAction)
        and action.help is not argparse.SUPPRESS
        and not set(action.option_strings) & set(_COMMON)
    )


def _group_rows(group: argparse._ArgumentGroup) -> list[tuple[str, str, str]]:
    shown = [action for action in group._group_actions if _is_shown(action)]
    return [(_option_name(action), _default(action), (action.help or "").replace("%(default)s", "")) for action in shown]


def _commands(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield inner
                yield from _commands(inner)


def _has_commands(parser: argparse.ArgumentParser) -> bool:
    return any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [_option_name(action).replace("`", "") for action in parser._actions if not action.option_strings]
    words = [f"[{word}]" if word == "model" else word for word in words]
    return " ".join([parser.prog, *words, "[options]"])


def make_cli_page() -> str:
    """Return the page of the command line."""
    from quire.cli.main import make_parser

    sections: list[list[str]] = []
    for parser in _commands(make_parser()):
        if _has_commands(parser):
            continue
        description = " ".join((parser.description or "").split()).removeprefix(f"`{parser.prog}`: ")
        description = description[:1].upper() + description[1:]
        lines = [f"## {parser.prog}", "", description, "", f"    {_usage(parser)}"]
        rows = [row for group in parser._action_groups if group.title in _OWN_GROUPS for row in _group_rows(group)]
        others = {str(group.title): found for group in parser._action_groups if (found := _group_rows(group))}
        for title, found in others.items():
            if title not in (_ENGINE_GROUP, *_OWN_GROUPS):
                rows += [(f"**{title.capitalize()}**", "", ""), *found]
        lines += ["", *_table(_OPTION_HEADS, rows)] if rows else []
        if _ENGINE_GROUP in others:
            lines += ["", "Also the [options of the engine](engine-options.md)."]
        sections.append(lines)
    text = (
        "Every command also takes `--help`, `--config FILE` (options from a YAML file), `--debug` (show tracebacks) and "
        "`--log-level debug|info|warning|error`. An option `--name=` takes a value. The exit "
        "status is 0, 1 after an error, 2 for wrong usage and 130 after Ctrl-C."
    )
    return _page("Command line", text, *sections)


def _field_rows(
    kind: type, option_of: Callable[[str], str] | None = None, help_of: dict[str, str] | None = None
) -> list[tuple[str, ...]]:
    """Return a row for each field; help_of: what to say of a field that the docstring does not explain."""
    meanings = (help_of or {}) | field_meanings(inspect.cleandoc(kind.__doc__ or ""))
    rows: list[tuple[str, ...]] = []
    for field in dataclasses.fields(kind):
        default = "required" if field.default is dataclasses.MISSING else _code(repr(field.default))
        option = () if option_of is None else (option_of(field.name),)
        rows.append((_code(field.name), *option, default, meanings.get(field.name, "")))
    return rows


def make_engine_page() -> str:
    """Return the page of EngineConfig and SpeculativeConfig."""
    from quire.cli import options
    from quire.contracts.config import EngineConfig
    from quire.contracts.speculative import SpeculativeConfig

    parser = argparse.ArgumentParser(add_help=False)
    options.add_engine_options(parser)
    by_name = {action.dest: action.option_strings for action in parser._actions}
    help_of = {action.dest: action.help or "" for action in parser._actions}

    def option_of(name: str) -> str:
        return "the positional argument" if name == "model" else " ".join(_code(option) for option in by_name.get(name, ()))

    text = (
        "Keywords of `LLM`, `LLMEngine` and `AsyncLLM` (`EngineConfig`), and the same as options of `quire serve`, `generate`, "
        "`chat` and other commands. An unknown keyword or a value that is not allowed is refused with a `ConfigError` that "
        "names the field."
    )
    engine = [
        "## Engine",
        "",
        *_table(("keyword", "option", "default", "meaning"), _field_rows(EngineConfig, option_of, help_of)),
    ]
    drafts = [
        "## Speculative decoding",
        "",
        "The fields of `speculative_config` (JSON on the command line), `SpeculativeConfig`:",
    ]
    drafts += ["", *_table(("field", "default", "meaning"), _field_rows(SpeculativeConfig))]
    return _page("Engine options", text, engine, drafts)


def make_request_page() -> str:
    """Return the page of the parameters of one request."""
    from quire.contracts.constraint import StructuredOutputsParams
    from quire.contracts.pooling_params import PoolingParams
    from quire.contracts.sampling_params import BeamSearchParams, SamplingParams

    kinds = (SamplingParams, StructuredOutputsParams, BeamSearchParams, PoolingParams)
    sections = [[f"## {kind.__name__}", "", *_table(("field", "default", "meaning"), _field_rows(kind))] for kind in kinds]
    text = (
        "The parameters of one request in Python. The HTTP APIs take most of them under the same names; `/openapi.json` of a "
        "running server describes their bodies. An invalid value is refused with a `RequestError` whose `param` is the field."
    )
    return _page("Request parameters", text, *sections)


def make_server_page() -> str:
    """Return the page of the options of `quire serve` that are not the engine's."""
    from quire.cli.main import make_parser

    serve = next(parser for parser in _commands(make_parser()) if parser.prog.endswith(" serve"))
    sections: list[list[str]] = []
    for group in serve._action_groups:
        rows = _group_rows(group)
        if rows and group.title not in (_ENGINE_GROUP, *_OWN_GROUPS):
            sections.append([f"## {str(group.title).capitalize()}", "", *_table(_OPTION_HEADS, rows)])
    text = (
        "Options of `quire serve MODEL` besides the [engine's](engine-options.md). What they do together is in "
        "[Serving](../serving.md) and [Deployment](../guides/deployment.md)."
    )
    return _page("Server options", text, *sections)


def make_routes_page() -> str:
    """Return the page of the HTTP routes."""
    from quire.serving.anthropic.endpoints import ENDPOINTS as ANTHROPIC
    from quire.serving.batch.endpoints import ENDPOINTS as BATCH
    from quire.serving.batch.message_batches import ENDPOINTS as MESSAGE_BATCHES
    from quire.serving.http.sleep import ENDPOINTS as SLEEP
    from quire.serving.http.system import make_endpoints
    from quire.serving.http.timelines import ENDPOINTS as TIMELINES
    from quire.serving.ollama.endpoints import ENDPOINTS as OLLAMA
    from quire.serving.openai.endpoints import ENDPOINTS as OPENAI
    from quire.serving.openai.lora import ENDPOINTS as LORA
    from quire.serving.responses.endpoints import ENDPOINTS as RESPONSES

    found = (*OPENAI, *RESPONSES, *ANTHROPIC, *OLLAMA, *BATCH, *MESSAGE_BATCHES, *LORA, *SLEEP, *TIMELINES)
    found = (*found, *make_endpoints(found, True))
    rows = [
        (
            _code(f"{endpoint.method} {endpoint.path}"),
            endpoint.summary,
            _code(endpoint.body.__name__) if endpoint.body is not None else "",
            "yes" if endpoint.is_streaming else "",
        )
        for endpoint in found
    ]
    text = (
        "Every route of `quire serve`; the types of bodies are in `quire/api`. `GET /openapi.json` of a running server "
        "describes bodies, answers, events and errors in full. The web page at `/` has "
        "routes of its own, which are not an interface."
    )
    return _page("Routes", text, _table(("route", "what it does", "body", "streams"), rows))


def make_metrics_page() -> str:
    """Return the page of the metrics."""
    from quire.serving.metrics.definitions import Definitions, GaugeSources
    from quire.serving.metrics.instruments import Counter, Histogram

    def nothing() -> None:
        return None

    common = ("model_name", "engine")
    definitions = Definitions(dict.fromkeys(common, ""), [GaugeSources(nothing, nothing, nothing, nothing, nothing)])
    rows: list[tuple[str, str, str, str]] = []
    for instrument in definitions.all:
        kind = type(instrument).__name__.lower()
        name = f"{instrument.name}_total" if isinstance(instrument, Counter) else instrument.name
        labels = " ".join(_code(label) for label in instrument.label_names if label not in common)
        buckets = f" Buckets up to {instrument.bounds[-1]:g}." if isinstance(instrument, Histogram) else ""
        rows.append((_code(name), kind, labels, instrument.text + buckets))
    text = (
        "`GET /metrics` in the text format of Prometheus. Every metric has the labels `model_name` and `engine` too, and those "
        "of `--metric-labels`. A histogram is exported as `_bucket`, `_sum` and `_count`. With `/metrics?compat=vllm` the "
        "prefix is `vllm:`. How to use them: [Metrics and monitoring](../guides/monitoring.md)."
    )
    return _page("Metrics", text, _table(("metric", "type", "labels", "meaning"), rows))


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": make_cli_page,
    "engine-options.md": make_engine_page,
    "metrics.md": make_metrics_page,
    "request-parameters.md": make_request_page,
    "routes.md": make_routes_page,
    "server-options.md": make_server_page,
}


def main(arguments: list[str]) -> int:
    """Write the pages; with --check write nothing, and return 1 where one is not current."""
    is_check = arguments == ["--check"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    stale: list[Any] = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT))
            if not is_check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path} is not current: run python tools/docs/make_reference.py" if is_check else f"wrote {path}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
