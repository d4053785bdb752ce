"""Options from a file and from the environment. The command line wins over both, the environment over the file."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.base.suggestions import did_you_mean
from quire.cli.other_engines import explain_option

if TYPE_CHECKING:
    import yaml

_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NEVER_SET = ("help", "version")
FLEET_FIELDS = ("models", "memory", "max-waiting-requests", "max-wait-s", "swap-after-s")
"""What a file with `models`, for a server with several, has in addition to options."""
FLEET_OPTIONS = frozenset(
    {
        *("host", "port", "api-key", "api-key-file", "allowed-hosts", "max-body-bytes", "max-held-body-bytes"),
        *("drain-timeout", "log-level", "debug"),
    }
)
"""The options of `quire serve` that are those of the whole server; the others belong to a model."""
ONE_MODEL_OPTIONS = frozenset(
    {
        *("uds", "ssl-keyfile", "ssl-certfile", "root-path", "served-model-name", "allowed-origins", "page", "access-log"),
        *("log-format", "lora-modules", "enable-lora"),
    }
)
"""The options that only a server with one model has. Clients of several name models and aliases only, never adapters."""


class SettingsError(Exception):
    """A setting that cannot be taken; the message says where it stands and what is allowed."""


def where_to_set(name: str) -> str:
    """Return what a message about several models says of an option that is none of the whole server."""
    return "it needs a server with one model" if name in ONE_MODEL_OPTIONS else "put it into a model's options"


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one option as its source states it.

    where   how messages call the source, such as "QUIRE_SERVE_PORT" or "serve.yaml: port"
    value   a text, or a list of texts from a file
    """

    where: str
    value: str | list[str]


Settings = dict[argparse.Action, Setting]


def settable_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a command that a file or the environment may set, by their names with hyphens."""
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest in _NEVER_SET or isinstance(action, argparse._SubParsersAction):
            continue
        if action.dest == "model" and not action.option_strings:
            found["model"] = action
        if action.help is argparse.SUPPRESS:
            continue
        for option in action.option_strings:
            is_negative = isinstance(action, argparse.BooleanOptionalAction) and option.startswith("--no-")
            if option.startswith("--") and not is_negative:
                found.setdefault(option[2:], action)
    return found


def variable_of(program: str, name: str) -> str:
    """Return the environment variable of an option, such as QUIRE_SERVE_PORT for "port" of "quire serve"."""
    return f"{program} {name}".replace("-", "_").replace(" ", "_").upper()


def environment_settings(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> Settings:
    """Return what the environment sets. A name with the prefix of the command that is no option is only warned of.

    Kubernetes, for example, adds such variables for a Service that is called quire-serve.
    """
    names = {variable_of(parser.prog, name): action for name, action in settable_options(parser).items()}
    prefix = variable_of(parser.prog, "")
    found: Settings = {}
    for variable in sorted(name for name in environment if name.startswith(prefix)):
        action = names.get(variable)
        if action is None:
            close = difflib.get_close_matches(variable, names, 1)
            print(f"{parser.prog}: the environment variable {variable} is no option{did_you_mean(close)}", file=sys.stderr)
        elif action in found:
            raise SettingsError(f"{variable} and {found[action].where} set the same option; unset one of them")
        else:
            found[action] = Setting(variable, environment[variable])
    return found


def file_settings(parser: argparse.ArgumentParser, path: Path) -> Settings:
    """Return what a YAML file sets, whose keys are names of options with hyphens or underscores. Raises SettingsError."""
    pairs = read_mapping(path)
    if parser.get_default("takes_fleet") and is_fleet(pairs):
        fields = [key for key, _ in pairs if key.replace("_", "-") not in FLEET_FIELDS]
        options = settable_options(parser)
        for key in fields:
            name = key.replace("_", "-")
            if name in options and name not in FLEET_OPTIONS:
                raise SettingsError(f"{path}: {key!r} is no option of several models: {where_to_set(name)}")
            if name not in options:
                close = difflib.get_close_matches(name, (*FLEET_FIELDS, *FLEET_OPTIONS), 1)
                raise SettingsError(f"{path}: {key[:100]!r} is no option of a server with several models{did_you_mean(close)}")
        pairs = [(key, node) for key, node in pairs if key in fields]
    return mapping_settings(parser, str(path), pairs)


def is_fleet(pairs: Iterable[tuple[str, yaml.Node]]) -> bool:
    """Return whether a file describes a server with several models."""
    return any(key == "models" for key, _ in pairs)


def mapping_settings(parser: argparse.ArgumentParser, where: str, pairs: Iterable[tuple[str, yaml.Node]]) -> Settings:
    """Return what the pairs of a mapping set; where: its place, for messages. Raises SettingsError."""
    options = {name: action for name, action in settable_options(parser).items() if name != "config"}
    found: Settings = {}
    for key, node in pairs:
        name = key.replace("_", "-")
        action = options.get(name)
        if action is None:
            hint = explain_option(f"--{name}", [f"--{one}" for one in options])
            close = difflib.get_close_matches(name, options, 1)
            raise SettingsError(f"{where}: {key[:100]!r} is no option of `{parser.prog}`{hint or did_you_mean(close)}")
        if action in found:
            raise SettingsError(f"{where}: {key!r} is set twice")
        found[action] = Setting(f"{where}: {key}", _value_of(f"{where}: {key}", action, node))
    return found


def read_mapping(path: Path) -> list[tuple[str, yaml.Node]]:
    """Return the pairs of the mapping that a YAML file is. Raises SettingsError."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise SettingsError("--config needs PyYAML, which is not installed: pip install 'quire[server]'") from None
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeError, RecursionError) as error:
        raise SettingsError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path} is not valid YAML: {' '.join(str(error).split())[:300]}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"--config {path} must have lines of the form NAME: VALUE")
    pairs = [(key, value) for key, value in root.value if isinstance(key, yaml.ScalarNode)]
    if len(pairs) < len(root.value):
        raise SettingsError(f"--config {path}: names of options must be plain text")
    return [(key.value, value) for key, value in pairs]


def switch_of(where: str, text: str) -> bool:
    """Return the value of a switch in a file. Raises SettingsError."""
    found = _SWITCHES.get(text.lower())
    if found is None:
        raise SettingsError(f"{where}: must be true or false, got {_shown(text)}")
    return found


def _value_of(where: str, action: argparse.Action, node: yaml.Node) -> str | list[str]:
    """Return the text of a node as it is written, so that 0123 stays 0123 and `off` is no truth value for a text."""
    import yaml

    if action.metavar == "JSON" and not isinstance(node, yaml.ScalarNode):
        return json.dumps(yaml.safe_load(yaml.serialize(node)))
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise SettingsError(f"{where}: a list must have plain values only")
        return [item.value for item in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise SettingsError(f"{where}: must be a value or a list, got a mapping")
    if node.tag == "tag:yaml.org,2002:null":
        raise SettingsError(f"{where}: has no value; leave the line out for the default")
    return node.value


def merge_settings(parser: argparse.ArgumentParser, layers: Iterable[Settings]) -> Settings:
    """Return what the layers set together; an earlier one wins, also over options that exclude those it sets."""
    merged: Settings = {}
    for layer in layers:
        outranked = set(merged) | {other for action in merged for other in excluded_by(parser, action)}
        for action, setting in layer.items():
            rival = next((layer[other] for other in excluded_by(parser, action) if other in layer), None)
            if rival is not None:
                raise SettingsError(f"{setting.where}: not allowed together with {rival.where}")
            if action not in outranked:
                merged[action] = setting
    return merged


def excluded_by(parser: argparse.ArgumentParser, action: argparse.Action) -> list[argparse.Action]:
    """Return the options that cannot be given together with one."""
    groups = [group._group_actions for group in parser._mutually_exclusive_groups if action in group._group_actions]
    return [other for group in groups for other in group if other is not action]


def convert(parser: argparse.ArgumentParser, action: argparse.Action, setting: Setting) -> Any:
    """Return what the option is set to, as if the text were on the command line. Raises SettingsError."""
    value, where = setting.value, setting.where
    is_list = action.nargs in ("+", "*")
    if action.nargs == 0:  # a switch
        if not isinstance(value, str):
            raise SettingsError(f"{where}: must be true or false, got {_shown(value)}")
        return switch_of(where, value)
    if isinstance(value, list) and not is_list and not isinstance(action, argparse._AppendAction):
        if not isinstance(action.metavar, str) or "," not in action.metavar:
            raise SettingsError(f"{where}: takes one value, got a list")
        value = ",".join(value)
    if isinstance(value, str) and is_list:
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}, got {_shown(value)}") from None
    texts = value if isinstance(value, list) else [value]
    if is_list and not texts:
        raise SettingsError(f"{where}: needs at least one value")
    try:
        values = [parser._get_value(action, text) for text in texts]
        for one in values:
            parser._check_value(action, one)
    except argparse.ArgumentError as error:
        raise SettingsError(f"{where}: {error.message}{_kubernetes_hint(value)}") from None
    return values if is_list or isinstance(action, argparse._AppendAction) else values[0]


def _shown(value: object) -> str:
    return repr(value)[:100]


def _kubernetes_hint(value: object) -> str:
    is_link = isinstance(value, str) and value.startswith("tcp://")
    return " (Kubernetes sets this for a Service of that name: give the pod enableServiceLinks: false)" if is_link else ""


def read_settings(parser: argparse.ArgumentParser, config: str | None) -> Settings:
    """Return what the environment and the file `config` set; the file may itself be set by the environment."""
    of_environment = environment_settings(parser, os.environ)
    config_action = settable_options(parser).get("config")
    if config is None and config_action in of_environment:
        config = str(of_environment[config_action].value)
    of_file = {} if config is None else file_settings(parser, Path(config).expanduser())
    return merge_settings(parser, [of_environment, of_file])


def config_path_of(words: Iterable[str]) -> str | None:
    """Return the file that --config names on a command line, before it is parsed; the last one counts."""
    found, words = None, list(words)
    words = words[: words.index("--")] if "--" in words else words
    for position, word in enumerate(words):
        if word == "--config" and position + 1 < len(words):
            found = words[position + 1]
        elif word.startswith("--config="):
            found = word.partition("=")[2]
    return found


class AppliedSettings:
    """Settings around one parse: `prepare` before it, `finish` after it puts them where the command line says nothing."""

    _UNSET = object()

    def __init__(self, parser: argparse.ArgumentParser, settings: Settings) -> None:
        self._parser = parser
        self._values = {action: convert(parser, action, setting) for action, setting in settings.items()}

    def prepare(self, namespace: argparse.Namespace) -> None:
        """Let argparse see that these options need not be given."""
        for action, value in self._values.items():
            action.required = False
            if not action.option_strings:
                action.default = value
            elif isinstance(action, argparse._AppendAction):
                setattr(namespace, action.dest, None)
            else:
                setattr(namespace, action.dest, self._UNSET)

    def finish(self, namespace: argparse.Namespace) -> None:
        """Fill in what the command line has left out, unless it has an option that excludes it."""
        left = [action for action in self._values if self._is_left_out(namespace, action)]
        for action in left:
            rivals = excluded_by(self._parser, action)
            is_excluded = any(rival not in left and getattr(namespace, rival.dest) != rival.default for rival in rivals)
            setattr(namespace, action.dest, action.default if is_excluded else self._values[action])

    def _is_left_out(self, namespace: argparse.Namespace, action: argparse.Action) -> bool:
        if not action.option_strings:
            return False  # argparse has taken its default
        value = getattr(namespace, action.dest)
        return value is None if isinstance(action, argparse._AppendAction) else value is self._UNSET
