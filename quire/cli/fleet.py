"""`quire serve --config FILE` with a list of `models` in the file: one server for several models."""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.environment import is_launched_group
from quire.base.errors import ConfigError, UnsupportedError
from quire.base.suggestions import did_you_mean
from quire.cli import options
from quire.cli.settings import (
    FLEET_FIELDS,
    FLEET_OPTIONS,
    ONE_MODEL_OPTIONS,
    AppliedSettings,
    Settings,
    SettingsError,
    is_fleet,
    mapping_settings,
    read_mapping,
    settable_options,
    switch_of,
    where_to_set,
)
from quire.contracts.memory import format_bytes, parse_bytes

if TYPE_CHECKING:
    import yaml

    from quire.fleet.config import FleetConfig, ModelEntry

_MODEL_FIELDS = ("name", "model", "aliases", "memory", "options", "preload", "pinned", "keep-alive-s")
_OF_THE_SERVER = FLEET_OPTIONS | {"model", "config"} | ONE_MODEL_OPTIONS
"""What a model's options must not have: it is set for its process, or stands at the top of the file."""
_OF_A_PARENT = frozenset(
    {
        *("model", "config", "host", "port", "uds", "ssl-keyfile", "ssl-certfile", "root-path", "allowed-hosts", "page"),
        *("max-body-bytes", "data-dir"),
    }
)
_SIZES = frozenset({"num-kv-blocks", "kv-cache-memory-bytes"})
_START_MARGIN_S = 30.0
_MEASURE_COMMAND = (sys.executable, "-m", "quire.cli.model_memory")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of the file.

    where    "fleet.yaml: models[0] (name)", for messages
    options  of its process, by their names: the values as the file states them
    args     the same as the command line's parser takes them
    memory   as the file has it; None where the plan decides
    """

    where: str
    name: str
    options: dict[str, str | list[str]]
    args: argparse.Namespace
    memory: str | None = None
    aliases: tuple[str, ...] = ()
    flags: Mapping[str, bool] = field(default_factory=dict[str, bool])
    keep_alive_s: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What quire.cli.model_memory says of a model; bytes of all its replicas together."""

    device: str
    available_bytes: int
    needed_bytes: int
    num_kv_blocks: int
    has_draft_model: bool


def is_fleet_file(path: str) -> bool:
    """Return whether a file of --config describes several models."""
    try:
        return is_fleet(read_mapping(Path(path).expanduser()))
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Serve several models until a signal ends it; 0 after a graceful end."""
    if is_launched_group():
        raise UnsupportedError("a server with several models starts its own processes: do not start it with a launcher")
    try:
        from quire.fleet.main import serve_fleet
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the server needs the package {error.name}, which is not installed: pip install 'quire[server]'"
        ) from None
    return serve_fleet(fleet_config(args))


def fleet_config(args: argparse.Namespace) -> FleetConfig:
    """Return the configuration that a file and the options describe. Starts a process that reads the models. Raises
    ConfigError."""
    from quire.cli.serve import read_keys
    from quire.fleet.config import FleetConfig

    path = Path(args.config).expanduser()
    _refuse_other_options(args)
    try:
        fields = _fleet_fields(path)
        entries = read_entries(path, fields["models"])
        budget = _converted(f"{path}: memory", _positive_bytes, _text(f"{path}: memory", fields.get("memory")))
        numbers = {
            "max_waiting_requests": (int, fields.get("max-waiting-requests")),
            "max_wait_s": (float, fields.get("max-wait-s")),
            "swap_after_s": (float, fields.get("swap-after-s")),
        }
        found = {name: _converted(f"{path}: {name}", kind, _text(name, node)) for name, (kind, node) in numbers.items()}
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    models, measured_budget = _measured_entries(entries, budget)
    try:
        return FleetConfig(
            models=models,
            memory_bytes=measured_budget if budget is None else budget,
            host=args.host,
            port=args.port,
            api_keys=read_keys(args.api_key, args.api_key_file),
            allowed_hosts=tuple(args.allowed_hosts),
            max_body_bytes=args.max_body_bytes,
            max_held_body_bytes=args.max_held_body_bytes,
            drain_timeout_s=args.drain_timeout,
            log_level=args.log_level,
            **{name: value for name, value in found.items() if value is not None},
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def serve_parser() -> argparse.ArgumentParser:
    """Return a new parser of `quire serve`."""
    from quire.cli.main import make_parser

    commands = next(one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return commands.choices["serve"]


def _refuse_other_options(args: argparse.Namespace) -> None:
    """Refuse options of one model that the command line or the environment gives."""
    parser = serve_parser()
    for name, action in settable_options(parser).items():
        if name in FLEET_OPTIONS or name == "config" or not hasattr(args, action.dest):
            continue
        if getattr(args, action.dest) != parser.get_default(action.dest):
            raise ConfigError(f"{name} cannot be given for several models in {args.config}: {where_to_set(name)}")


def _fleet_fields(path: Path) -> dict[str, yaml.Node]:
    found: dict[str, yaml.Node] = {}
    for key, node in read_mapping(path):
        name = key.replace("_", "-")
        if name in FLEET_FIELDS and name in found:
            raise SettingsError(f"{path}: {key!r} is set twice")
        found[name] = node
    return found


def read_entries(path: Path, node: yaml.Node) -> list[FileEntry]:
    """Return the entries of `models`, whose options were checked. Raises SettingsError, ConfigError."""
    import yaml

    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise SettingsError(f"{path}: models must be a list with at least one entry")
    entries = [_read_entry(f"{path}: models[{number}]", item) for number, item in enumerate(node.value)]
    _check_data_dirs(entries)
    return entries


def check_replica_options(model: str, given: Mapping[str, object]) -> None:
    """Check the options of a `quire serve` that another program starts, on a socket of its own. Raises ConfigError.

    given  {name: value} as in a file of --config
    """
    import yaml

    taken = {name for name in given if name.replace("_", "-") in _OF_A_PARENT}
    if taken:
        raise ConfigError(f"options: {min(taken)!r} cannot be set here: the application sets it")
    parser = serve_parser()
    node = yaml.compose(json.dumps(dict(given)), Loader=yaml.SafeLoader)
    try:
        settings = mapping_settings(parser, "options", [(str(key.value), value) for key, value in node.value])
        _parse(parser, "options", model, settings)
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def _check_data_dirs(entries: list[FileEntry]) -> None:
    """Refuse a folder for two models: each process takes the unfinished responses in it for those of a server that ended."""
    seen: dict[Path, str] = {}
    for entry in entries:
        if entry.args.data_dir is None:
            continue
        folder = Path(entry.args.data_dir).expanduser().resolve()
        if folder in seen:
            raise SettingsError(f"{entry.where}: options: data-dir {folder} is that of {seen[folder]}; give each model its own")
        seen[folder] = entry.where


def _read_entry(where: str, node: yaml.Node) -> FileEntry:
    fields = _entry_fields(where, node)
    model = _text(f"{where}: model", fields.get("model"))
    if model is None:
        raise SettingsError(f"{where}: model is needed: a folder, a hub id or a bundled model")
    name = _text(f"{where}: name", fields.get("name")) or model
    where = f"{where} ({name})"
    parser = serve_parser()
    settings = _read_options(parser, f"{where}: options", fields.get("options"))
    flags = {
        flag: switch_of(f"{where}: {flag}", text)
        for flag in ("preload", "pinned")
        if (text := _text(f"{where}: {flag}", fields.get(flag))) is not None
    }
    keep_alive = _text(f"{where}: keep_alive_s", fields.get("keep-alive-s"))
    return FileEntry(
        where=where,
        name=name,
        options={"model": model, **{_name_of(parser, action): setting.value for action, setting in settings.items()}},
        args=_parse(parser, where, model, settings),
        memory=_text(f"{where}: memory", fields.get("memory")),
        aliases=_texts(f"{where}: aliases", fields.get("aliases")),
        flags=flags,
        keep_alive_s=_converted(f"{where}: keep_alive_s", float, keep_alive),
    )


def _entry_fields(where: str, node: yaml.Node) -> dict[str, yaml.Node]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{where}: must have the fields {', '.join(_MODEL_FIELDS)}")
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = str(key.value).replace("_", "-")
        if name not in _MODEL_FIELDS:
            close = did_you_mean(difflib.get_close_matches(name, _MODEL_FIELDS, 1))
            is_option = name in settable_options(serve_parser())
            hint = ", but an option: it goes into options" if is_option and name not in _OF_THE_SERVER else close
            raise SettingsError(f"{where}: {str(key.value)[:100]!r} is no field of a model{hint}")
        if name in found:
            raise SettingsError(f"{where}: {key.value!r} is set twice")
        found[name] = value
    return found


def _read_options(parser: argparse.ArgumentParser, where: str, node: yaml.Node | None) -> Settings:
    import yaml

    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{where}: must be a mapping of option names to values")
    pairs = [(str(key.value), value) for key, value in node.value]
    for key, _ in pairs:
        if (name := key.replace("_", "-")) in _OF_THE_SERVER:
            hint = ": set it at the top of the file" if name in FLEET_OPTIONS else ""
            hint = ": it needs a server with one model" if name in ONE_MODEL_OPTIONS else hint
            raise SettingsError(f"{where}: {key!r} cannot be set for one model{hint}")
    return mapping_settings(parser, where, pairs)


def _parse(parser: argparse.ArgumentParser, where: str, model: str, settings: Settings) -> argparse.Namespace:
    """Return the options as the command line's parser takes them, checked like those of a server with one model."""
    from quire.cli.serve import server_config

    applied = AppliedSettings(parser, settings)
    args = argparse.Namespace()
    applied.prepare(args)
    # Not the parser's own method, which reads the environment: that sets options of the whole server.
    args, _ = argparse.ArgumentParser.parse_known_args(parser, [model], args)
    applied.finish(args)
    args.model = model
    try:
        options.engine_config(args, takes_replicas=True)
        server_config(args)
    except ConfigError as error:
        raise ConfigError(f"{where}: options: {error}") from None
    return args


def _name_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return next(name for name, one in settable_options(parser).items() if one is action)


def _text(where: str, node: yaml.Node | None) -> str | None:
    import yaml

    if node is None:
        return None
    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null" or not node.value.strip():
        raise SettingsError(f"{where}: must be one value")
    return node.value


def _texts(where: str, node: yaml.Node | None) -> tuple[str, ...]:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return tuple([_text(where, item) or "" for item in node.value])
    text = _text(where, node)
    return () if text is None else (text,)


def _converted(where: str, convert: Callable[[str], Any], text: str | None) -> Any:
    """Return the value of a text; None for none. Raises SettingsError."""
    if text is None:
        return None
    try:
        return convert(text)
    except ConfigError as error:
        raise SettingsError(f"{where}: {error}") from None
    except ValueError:
        raise SettingsError(f"{where}: must be a number, got {text[:100]!r}") from None


def _measured_entries(entries: list[FileEntry], budget: int | None) -> tuple[tuple[ModelEntry, ...], int]:
    """Return the entries with the memory that each needs, and the memory that there is. Raises ConfigError."""
    from quire.fleet.config import ModelEntry

    shares = [_own_memory(entry, budget) for entry in entries]
    planned = [_planned_options(entry, share or budget) for entry, share in zip(entries, shares, strict=True)]
    measured = measure(entries, planned)
    devices = {one.device: entry.where for entry, one in zip(entries, measured, strict=True)}
    if len(devices) > 1:
        found = ", ".join(f"{where} on {device}" for device, where in devices.items())
        raise ConfigError(f"all models must be on one device, got {found}; set device in their options")
    made: list[ModelEntry] = []
    for entry, share, settings, one in zip(entries, shares, planned, measured, strict=True):
        fixed = _fixed_options(entry, share, settings, one)
        try:
            made.append(
                ModelEntry(
                    name=entry.name,
                    memory_bytes=share or one.needed_bytes,
                    aliases=entry.aliases,
                    options=fixed,
                    keep_alive_s=entry.keep_alive_s,
                    start_timeout_s=entry.args.start_timeout + _START_MARGIN_S,
                    **entry.flags,
                )
            )
        except ConfigError as error:
            raise ConfigError(f"{entry.where}: {error}") from None
    return tuple(made), min(one.available_bytes for one in measured)


def _positive_bytes(text: str) -> int:
    num_bytes = parse_bytes(text)
    if num_bytes < 1:
        raise ConfigError(f"must be more than 0 bytes, got {text[:100]!r}")
    return num_bytes


def _own_memory(entry: FileEntry, budget: int | None) -> int | None:
    """Return the bytes that the file gives a model, as a size or as a share of the budget."""
    text = entry.memory
    if text is None:
        return None
    try:
        if not text.strip().endswith("%"):
            return _positive_bytes(text)
        share = float(text.strip().removesuffix("%")) / 100
    except ConfigError as error:
        raise ConfigError(f"{entry.where}: memory: {error}") from None
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"{entry.where}: memory: a share must be between 0% and 100%, got {text[:100]!r}")
    if budget is None:
        raise ConfigError(f"{entry.where}: memory: a share needs memory at the top of the file, got {text!r}")
    return int(budget * share)


def _planned_options(entry: FileEntry, limit: int | None) -> dict[str, str | list[str]]:
    """Return the options with the limit of the memory plan, unless the file gives one."""
    if limit is None or "host-memory-bytes" in entry.options:
        return entry.options
    return {**entry.options, "host-memory-bytes": str(limit)}


def _fixed_options(
    entry: FileEntry, share: int | None, settings: dict[str, str | list[str]], measured: MeasuredModel
) -> dict[str, str | list[str]]:
    """Return the options with which the process takes no more than what it counts with. Raises ConfigError."""
    is_sized = bool(_SIZES & set(entry.options))
    if share is None:
        if measured.has_draft_model:
            raise ConfigError(f"{entry.where}: memory is needed: the plan does not count the draft model")
        # The pool is that of the plan, however much is free when the process starts.
        return settings if is_sized else {**settings, "num-kv-blocks": str(measured.num_kv_blocks)}
    if measured.device.startswith("cuda") and not is_sized:
        raise ConfigError(f"{entry.where}: with memory, a model on a GPU needs kv-cache-memory-bytes in its options")
    if measured.needed_bytes > share:
        raise ConfigError(
            f"{entry.where}: memory is {format_bytes(share)}, but the model needs {format_bytes(measured.needed_bytes)} with "
            "these options; raise it, or lower max-model-len, max-num-seqs, max-num-batched-tokens or kv-cache-memory-bytes"
        )
    return settings


def measure(entries: list[FileEntry], planned: list[dict[str, str | list[str]]]) -> list[MeasuredModel]:
    """Return what the models need. A process of its own reads them: this one shall not load torch, nor hold memory of a GPU.
    Raises ConfigError."""
    from quire.fleet.process import child_environment

    with tempfile.TemporaryDirectory(prefix="quire-fleet-") as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(len(entries))]
        for path, settings in zip(paths, planned, strict=True):
            path.write_text(json.dumps(settings), encoding="utf-8")
        command = [*_MEASURE_COMMAND, *map(str, paths)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=child_environment(), text=True, check=False
        )
    try:
        reports: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    except ValueError:
        reports = []
    for entry, report in zip(entries, reports, strict=False):
        if "error" in report:
            raise ConfigError(f"{entry.where}: {report['error']}")
    if done.returncode or len(reports) != len(entries):
        raise ConfigError(f"the models could not be read: the process that does it ended with {done.returncode}")
    return [MeasuredModel(**report) for report in reports]
